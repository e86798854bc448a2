"""How many hidden tests passed: the judge compares what the test program printed. Pure.

The program runs in one process with the code under test, so nothing it says of itself counts: that
code can print, patch `builtins` or end the process with 0. It is asked for results instead, one a
line at the end of its output, and what they must be is known only here.
"""

import operator
from collections.abc import Sequence

import msgspec

from penstock.messages.sandbox import ExecResult


class SuiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of hidden tests."""

    num_passed: int
    num_tests: int
    is_solved: bool


def read_report(done: ExecResult, expected: Sequence[str]) -> SuiteReport:
    """Compare the last lines of a test program with the expected results; too few: none passed."""
    num_tests = len(expected)
    lines = done.stdout.decode("utf-8", "replace").removesuffix("\n").split("\n")
    results = lines[len(lines) - num_tests :] if len(lines) >= num_tests else []
    num_passed = sum(map(operator.eq, results, expected))
    is_solved = (
        0 < num_tests == num_passed
        and done.exit_code == 0
        and not done.timed_out
        and not done.truncated
    )
    return SuiteReport(num_passed=num_passed, num_tests=num_tests, is_solved=is_solved)
