"""Manners, counted: style, communication, to-dos."""

import pytest

from penstock.actors.judge.config import AuxiliaryConfig
from penstock.actors.judge.judges import auxiliary_scores, communication, style, todos
from penstock.actors.judge.submission import ChangedFile, Submission, says_something

TO_DO, TO_FIX = "todo".upper(), "fixme".upper()
BEFORE = f"import os\nimport sys  # {TO_DO}: needed?\n\n\ndef f(x):\n    return os.sep\n"


def work(after: str | None, final: str = "", before: str | None = BEFORE, path: str = "m.py"):
    file = ChangedFile(path=path, before=before, after=after)
    return Submission(sample_id="r", files=[file], diff=file.diff(), final=final)


def test_only_lints_of_the_written_lines_count() -> None:
    assert style(work(BEFORE + "y = 1\n")).score == 1.0
    found = style(work(BEFORE + "import re\nfrom a import b\n"))
    assert found.score == pytest.approx(1 / 3) and "m.py:7: 're' imported" in found.detail


@pytest.mark.parametrize("after", ["def f(:\n", "(" * 5000, "x = 1\n" * 20_000, "\x00"])
def test_a_file_that_cannot_be_linted_counts_as_one_lint(after: str) -> None:
    assert style(work(after)).score == 0.5


def test_other_and_deleted_files_have_no_lints() -> None:
    assert style(work("import os", path="m.txt")).score == 1.0
    assert style(work(None)).score == 1.0


def test_only_todos_that_it_wrote_count() -> None:
    assert todos(work(BEFORE + "y = 1\n")).score == 1.0
    found = todos(work(BEFORE + f"# {TO_FIX} later\n- [ ] check\ntodo_list = 1\n"))
    assert found.score == pytest.approx(1 / 3) and f"m.py:7: # {TO_FIX} later" in found.detail


def test_open_points_of_its_own_plan_count() -> None:
    plan = "Plan for m.py:\n- [x] look\n- [ ] fix\n2. [ ] test\n"
    assert todos(work(BEFORE, plan)).score == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        ("", 0.0),
        ("Solution:", 0.0),
        ("Everything works now.", 0.5),
        ("I fixed the separator in src/join_paths.py.", 1.0),
        ("The function in join_paths no longer adds one.", 1.0),
        ("The function in rejoin_paths2 no longer adds one.", 0.5),
    ],
)
def test_a_message_is_there_and_names_what_was_changed(final: str, expected: float) -> None:
    assert communication(work("x = 1\n", final, path="src/join_paths.py")).score == expected


def test_only_what_has_a_weight_is_scored() -> None:
    submission = work(BEFORE)
    assert auxiliary_scores(submission, AuxiliaryConfig()) == []
    found = auxiliary_scores(submission, AuxiliaryConfig(todos=0.1, style=0.1))
    assert [one.judge for one in found] == ["style", "todos"]


def test_a_diff_is_one_hunk_with_context() -> None:
    file = ChangedFile(path="m.py", before="a\nb\nc\nd\ne\n", after="a\nb\nX\nd\ne\n")
    assert file.diff().split("\n") == ["--- m.py", "+++ m.py", " a", " b", "-c", "+X", " d", " e"]
    for before, after in (("a\n", "a\na\n"), ("a\na\n", "a\n"), (None, "a\n"), ("a\n", None)):
        lines = ChangedFile(path="p", before=before, after=after).diff().split("\n")[2:]
        signs = "".join(line[0] for line in lines)
        assert signs.count("+") - signs.count("-") == len((after or "").split()) - len(
            (before or "").split()
        )


def test_words_beside_an_opening_say_something() -> None:
    assert says_something("Solution: use a set") and says_something("解 x")
    for text in ("", ":", "...", "**Solution**", "Thought process:\n\n", "Final answer: "):
        assert not says_something(text)
