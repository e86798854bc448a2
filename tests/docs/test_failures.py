"""docs/failures.md quotes what the code says, and a test provokes each message."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.docs.commands import ROOT
from tests.tidy.repository import Repository

PAGE = ROOT / "docs" / "failures.md"
ROW = re.compile(r"^\| (.+?) \| .+ \|", re.MULTILINE)
NUM_WORDS_TELLING = 3
"""A message of fewer words may be part of any sentence: it has to begin what is compared."""


def strings(node: ast.AST) -> list[str]:
    """Return every string of some code; what f-strings fill in is `\\0`."""
    found: list[str] = []
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):
            parts = [getattr(part, "value", "") for part in each.values]
            found.append("".join(p if isinstance(p, str) else "\0" for p in parts))
        elif isinstance(each, ast.Constant) and isinstance(each.value, str | bytes):
            found.append(each.value if isinstance(each.value, str) else repr(each.value)[2:-1])
    return found


@cache
def said() -> list[str]:
    """Return every string of the product."""
    repository = Repository()
    return [
        text for path in repository.python() for text in strings(ast.parse(repository.text(path)))
    ]


def messages() -> list[str]:
    """Return the first column of each table, one message each."""
    first = [row for row in ROW.findall(PAGE.read_text()) if row.startswith("`")]
    return [message for row in first for message in _quotes(row)]


def _quotes(cell: str) -> list[str]:
    quoted = cell.split(" after ")
    return [each.strip()[1:-1] for each in quoted if each.startswith("`")]


def fragments(message: str) -> list[str]:
    return [stripped for part in message.split("...") if (stripped := part.strip(" ()%."))]


@pytest.mark.parametrize("message", messages())
def test_the_code_says_each_message(message: str):
    pattern = re.compile(".*".join(map(re.escape, fragments(message))), re.DOTALL)
    assert any(pattern.search(text) for text in said())


def test_there_are_messages():
    assert len(messages()) > 40


@cache
def compared() -> dict[str, list[str]]:
    """Return what each test function compares with: its strings, those of its decorators too."""
    return {
        f"{path.relative_to(ROOT)}::{node.name}": strings(node)
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def is_quoted(message: str, texts: list[str]) -> bool:
    if len(message.split()) < NUM_WORDS_TELLING:
        return any(text.startswith(message) for text in texts)
    return all(any(part in text for text in texts) for part in fragments(message))


@pytest.mark.parametrize("message", messages())
def test_a_test_provokes_each_message(message: str):
    assert any(is_quoted(message, texts) for texts in compared().values()), "no test quotes it"
