from penstock.examples.quickstart.ladder.function import BODY, mutations

SOURCE = '''def f(a, b):
    """Return the larger of a and b, at least 1."""
    return max(a, b) if a > 0 else b + 1'''


def categories(source):
    return {mutation.category for mutation in mutations(source)}


def test_every_kind_of_place_gives_its_category():
    assert categories(SOURCE) == {"operator", "comparison", "constant", "call", "argument", BODY}


def test_each_mutation_changes_one_line_of_the_body_and_never_the_docstring():
    for mutation in mutations(SOURCE)[:-1]:
        before, after = SOURCE.splitlines(), mutation.source.splitlines()
        assert len(before) == len(after)
        assert [one == other for one, other in zip(before, after, strict=True)] == [
            True,
            True,
            False,
        ], mutation


def test_mutations_leave_each_other_alone():
    sources = [mutation.source for mutation in mutations(SOURCE)]
    assert len(set(sources)) == len(sources)
    assert mutations(SOURCE) == mutations(SOURCE)


def test_sites_do_not_depend_on_names():
    first = mutations('def f(a, b):\n    """Doc."""\n    return max(a, b) + 1')
    second = mutations('def g(left, x):\n    """Other."""\n    return max(left, x) + 1')
    assert [mutation.site for mutation in first] == [mutation.site for mutation in second]


def test_the_last_one_has_no_body():
    last = mutations(SOURCE)[-1]
    assert last.category == last.site == BODY
    assert last.source.splitlines()[2:] == ["    raise NotImplementedError"]


def test_receiver_and_argument_of_a_method_can_swap():
    source = 'def f(s, p):\n    """Doc."""\n    return s.count(p)'
    assert any("p.count(s)" in mutation.source for mutation in mutations(source))
