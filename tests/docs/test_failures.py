"""docs/failures.md quotes what the code says."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.docs.commands import ROOT
from tests.tidy.repository import Repository

PAGE = ROOT / "docs" / "failures.md"
ROW = re.compile(r"^\| (.+?) \| .+ \|", re.MULTILINE)


@cache
def said() -> str:
    """Return every string of the product; what f-strings fill in is left out, as `\\0`."""
    repository = Repository()
    found: list[str] = []
    for path in repository.python():
        for node in repository.nodes(path):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "") for part in node.values]
                found.append("".join(p if isinstance(p, str) else "\0" for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def messages() -> list[str]:
    """Return the first column of each table, one message each."""
    first = [row for row in ROW.findall(PAGE.read_text()) if row.startswith("`")]
    return [message for row in first for message in _quotes(row)]


def _quotes(cell: str) -> list[str]:
    quoted = cell.split(" after ")
    return [each.strip()[1:-1] for each in quoted if each.startswith("`")]


@pytest.mark.parametrize("message", messages())
def test_the_code_says_each_message(message: str):
    fragments = [part.strip(" ()%.") for part in message.split("...")]
    missing = [each for each in fragments if each and each not in said()]
    assert not missing, f"no source file says {missing}"


def test_there_are_messages():
    assert len(messages()) > 40


NOT_PROVOKED = {
    "the ledger does not balance": "only a fault of the product gives it",
    "the replay differs": "as above",
    "no replay": "needs a run with expert parallelism: tests/engines/ranks",
    "invalid_api_key": "of a gateway that runs: tests/e2e/test_run_faults.py",
}
"""Message -> why no fast test provokes it."""


@cache
def all_tests() -> str:
    """Return the source of all tests but this one."""
    here = Path(__file__)
    return "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != here)


@pytest.mark.parametrize("message", messages())
def test_a_test_provokes_each_message(message: str):
    fragments = [part.strip(" ()%.") for part in message.split("...")]
    is_tested = all(each in all_tests() for each in fragments)
    assert is_tested or message in NOT_PROVOKED, "neither provoked nor in NOT_PROVOKED"
