"""What `read_file` shows can be edited, whatever the line endings, and files keep theirs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs.harness.files import changed_lines
from penstock.envs.harness.line_endings import (
    find_shown,
    only_ending,
    replaced,
    split_lines,
    with_ending,
)

ENDINGS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.lists(st.text("ab \x0c\x85é", max_size=4), min_size=1, max_size=6)


def edited(text: str, old: str, new: str) -> str:
    [span] = find_shown(text, old)
    return replaced(text, span, old, new)


@pytest.mark.parametrize(
    ("text", "old", "new", "after"),
    [
        ("a\r\nb\r\nc\r\n", "a\nb\n", "x\n", "x\r\nc\r\n"),
        ("a\r\nb\r\n", "b", "b1\nb2", "a\r\nb1\r\nb2\r\n"),
        ("a\r\nb", "b", "b1\nb2", "a\r\nb1\r\nb2"),
        ("a\rb\r", "a\nb", "c\nd", "c\rd\r"),
        ("a\r\nb\nc\n", "a\nb\nc", "A\nB\nC", "A\r\nB\nC\n"),
        ("a\nb\n", "a\nb\n", "c\n", "c\n"),
        ("a\r\nb\r\n", "a\r\nb\r\n", "a\nb\n", "a\nb\n"),
        ("one", "one", "1\n2", "1\n2"),
    ],
)
def test_an_edit_keeps_the_endings_of_the_lines_around_it(text, old, new, after):
    assert edited(text, old, new) == after


def test_text_with_the_very_endings_is_found_first():
    assert find_shown("a\r\nb\na\nb", "a\nb") == [(5, 8)]
    assert len(find_shown("a\r\nb a\rb", "a\nb")) == 2
    assert find_shown("a b", "a\nb") == []


@given(LINES, ENDINGS)
def test_every_line_of_a_file_is_found_as_shown(lines, ending):
    text = ending.join(lines) + ending
    assert split_lines(text) == lines
    shown = "\n".join(split_lines(text))
    assert find_shown(text, shown)[0] == (0, len(text) - len(ending))


@given(LINES, ENDINGS, st.text("ab\n", max_size=8))
def test_a_file_with_one_ending_keeps_it(lines, ending, new):
    text = ending.join(["first", *lines, "last"])
    after = edited(text, "first", "start\n" + new)
    assert only_ending(after) == ending
    assert with_ending(after, "\n") == with_ending(text, "\n").replace("first", "start\n" + new, 1)


def test_a_change_of_endings_is_a_change():
    assert changed_lines("a\r\nb\r\n", "a\nb\n") == "only line endings changed"
    assert changed_lines("a\r\nb\r\n", "a\r\nc\r\n") == "-b\n+c"
    assert changed_lines("a\n", "a\n") == "no line changed"
