"""What a run of hidden tests says: how many there are, and how many passed. Pure.

The exit code alone proves nothing: a module that calls `sys.exit(0)` when imported ends the run
with 0. The last line of the test program's output must be `passed N of M`, with N = M > 0.
"""

import re

import msgspec

from penstock.envs.sandbox import ExecResult

_REPORT = re.compile(rb"passed (\d+) of (\d+)")


class SuiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of hidden tests."""

    num_passed: int
    num_tests: int
    is_solved: bool


def read_report(done: ExecResult) -> SuiteReport:
    """Read the closing line of a test program; without it no test passed."""
    lines = done.stdout.strip().splitlines()
    match = _REPORT.fullmatch(lines[-1].strip()) if lines else None
    num_passed, num_tests = (int(n) for n in match.groups()) if match else (0, 0)
    is_solved = (
        0 < num_tests == num_passed
        and done.exit_code == 0
        and not done.timed_out
        and not done.truncated
    )
    return SuiteReport(num_passed=num_passed, num_tests=num_tests, is_solved=is_solved)
