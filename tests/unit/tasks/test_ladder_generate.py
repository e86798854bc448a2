import random

import pytest

from penstock.examples.quickstart.ladder.dry_run import run_program
from penstock.examples.quickstart.ladder.generate import (
    LADDER,
    NOVEL,
    NOVEL_FAMILIES,
    BrokenTaskError,
    Selection,
    draw_repositories,
    functions,
    grade_here,
)
from penstock.examples.quickstart.ladder.names import is_kept_out
from penstock.examples.quickstart.ladder.repository import CHECK_FILE, PAIR, SEARCH, short_edit
from penstock.messages.task import Split


def draw(split, num, categories=LADDER, seed=0):
    return list(
        draw_repositories(
            split, num, Selection(categories=categories), random.Random(seed), split.value
        )
    )


@pytest.fixture(scope="module")
def train():
    return draw(Split.TRAIN, 70)


@pytest.fixture(scope="module")
def heldout():
    return draw(Split.HELDOUT, 64, (*LADDER, NOVEL))


def test_the_same_seed_gives_the_same_tasks(train):
    assert draw(Split.TRAIN, 70) == train
    assert draw(Split.TRAIN, 70, seed=1) != train


def test_categories_take_turns_and_ids_and_files_are_distinct(train):
    assert [one.task.category for one in train] == [*LADDER] * 10
    assert len({one.task.task_id for one in train}) == 70
    assert len({one.faults[0].text for one in train}) == 70


def test_repositories_are_small_and_the_instruction_names_the_function(train):
    for one in train:
        assert 2 <= len(one.task.files) <= 5
        assert max(len(text.splitlines()) for text in one.task.files.values()) <= 24
        assert one.faults[0].function_name in one.task.instruction
        assert (one.faults[0].path in one.task.instruction) == (one.task.category != SEARCH)


def solved_by(one, faults):
    """Whether hidden tests pass with some of a task's faults mended."""
    mended = {
        fault.path: fault.text.replace(fault.gold_edit.old, fault.gold_edit.new) for fault in faults
    }
    return grade_here(one.task.files | mended, one.hidden).is_solved


def test_the_gold_edit_solves(train):
    for one in train:
        [fault] = one.faults
        assert one.task.files[fault.path] == fault.text
        assert fault.text.count(fault.gold_edit.old) == 1
        assert one.hidden.gold_files == {fault.path: fault.gold_text}
        assert solved_by(one, one.faults)


@pytest.mark.parametrize("split", list(Split))
def test_a_pair_has_two_bugs_in_two_files_and_is_solved_by_both_edits_alone(split):
    for one in draw(split, 24, (PAIR,)):
        first, second = one.faults
        assert first.path != second.path and first.function_name != second.function_name
        for fault in one.faults:
            assert f"{fault.function_name} in {fault.path}" in one.task.instruction
            assert not solved_by(one, [fault])
        assert solved_by(one, one.faults)
        gold = one.task.files | one.hidden.gold_files
        assert run_program(gold, CHECK_FILE) == (0, "ok\n")
        for path in one.hidden.gold_files:
            code, words = run_program(gold | {path: one.task.files[path]}, CHECK_FILE)
            assert code != 0 and "ok" not in words


def test_pairs_are_drawn_where_they_are_named_alone():
    assert PAIR not in Selection().categories
    assert {one.task.category for one in draw(Split.TRAIN, 4, (PAIR, "operator"))} == {
        PAIR, "operator",
    }  # fmt: skip


def test_hidden_tests_are_no_visible_file(train):
    for one in train:
        assert not set(one.hidden.files) & set(one.task.files)
        assert CHECK_FILE in one.task.files


def pairs(repositories):
    return {
        tuple(fault.function_name.rsplit("_", 1)) for one in repositories for fault in one.faults
    }


def test_function_names_of_the_splits_never_meet(train, heldout):
    assert all(is_kept_out(*pair) for pair in pairs(heldout))
    assert not any(is_kept_out(*pair) for pair in pairs(train))


def test_families_kept_out_are_in_no_training_task(train):
    docstrings = [
        f.canonical.split('"""')[1].split("$")[0] for f in functions(tuple(NOVEL_FAMILIES))
    ]
    assert {f.template.family for f in functions(tuple(NOVEL_FAMILIES))} == NOVEL_FAMILIES
    texts = "\n".join(text for one in train for text in one.task.files.values())
    assert "without a rim" not in texts
    assert docstrings
    with pytest.raises(BrokenTaskError, match="never trained on"):
        draw(Split.TRAIN, 1, (NOVEL,))


def test_no_wrong_edit_is_the_gold_edit(train):
    rng = random.Random(0)
    edits = [(one.faults[0], one.faults[0].wrong_edit(rng)) for one in train]
    drawn = [(fault, edit) for fault, edit in edits if edit]
    assert len(drawn) > 60
    for fault, edit in drawn:
        assert edit != fault.gold_edit
        assert fault.text.count(edit.old) == 1


def test_an_edit_takes_as_little_as_uniqueness_needs():
    edit = short_edit("a < b + 1", "a <= b + 1", "a < b + 1")
    assert (edit.old, edit.new) == (" <", " <=")
    edit = short_edit("a < b + 1", "a < b + 10", "a < b + 1\n1 + 1")
    assert (edit.old, edit.new) == (" b + 1", " b + 10")
    assert short_edit("a", "a", "a") is None
    assert short_edit("a", "b", "a a a") is None


def test_every_function_has_bugs_that_its_cases_catch():
    for function in functions() + functions(tuple(NOVEL_FAMILIES)):
        assert len(function.killers) >= 2, function.name
        cases = function.hidden_cases(random.Random(0))
        indexes = {function.cases.index(case) for case in cases}
        for site, failed in function.killers.items():
            assert indexes & set(failed), (function.name, site)
