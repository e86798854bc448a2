"""Runs a client's cases one by one; prints a line of JSON for each.

Arguments of a program: `URL KEY SLOW_KEY`, where URL ends before `/v1` and SLOW_KEY
may make two requests per minute.
"""

import json
import sys
import traceback
from collections.abc import Callable

URL, KEY, SLOW_KEY = sys.argv[1:4]
WRONG_KEY = "psk-wrong"
MODEL = "policy"
USER = [{"role": "user", "content": "Fix the tests."}]
ANSWERS = ("The tests pass.", "The tests passed.")
LONG = "word " * 70_000
"""More tokens than the context has."""
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "enum": ["ls", "pwd"]}},
    "required": ["command"],
    "additionalProperties": False,
}
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"passed": {"type": "boolean"}, "grade": {"type": "string", "enum": ["A", "B"]}},
    "required": ["passed", "grade"],
    "additionalProperties": False,
}

_CASES: list[tuple[str, Callable[[], object]]] = []


def case(function: Callable[[], object]) -> Callable[[], object]:
    """Note a case; its name is the function's."""
    _CASES.append((function.__name__, function))
    return function


def same(found: object, expected: object) -> None:
    """Compare."""
    assert found == expected, f"expected {expected!r}, got {found!r}"


def among(found: object, expected: object) -> None:
    """Compare with several."""
    assert found in expected, f"expected one of {expected!r}, got {found!r}"


def raises(kinds: type[Exception] | tuple, function: Callable[[], object]) -> Exception:
    """Return the exception of one of these classes that `function` must raise."""
    try:
        function()
    except kinds as error:
        return error
    raise AssertionError(f"expected {kinds}, got no exception")


def main() -> None:
    """Run all cases."""
    for name, function in _CASES:
        text = ""
        try:
            function()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in where if frame.name == name]
            text = f"line {lines[-1:]}: {type(error).__name__}: {error}"[:600]
        print(json.dumps({"case": name, "error": text}), flush=True)
