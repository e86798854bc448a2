"""What a run of hidden tests says: how many tests ran, and how many passed. Pure.

The exit code alone proves nothing: a module that calls `sys.exit(0)` when imported ends a test run
with 0. The runner's own closing lines must be there and agree.
"""

import re

import msgspec

from penstock.messages.machine import CommandFinished

_RAN = re.compile(rb"^Ran (\d+) tests? in ", re.MULTILINE)
_OK = re.compile(rb"^OK(?: \(.*\))?\s*$", re.MULTILINE)
_FAILED = re.compile(rb"^FAILED \((.*)\)\s*$", re.MULTILINE)
_COUNT = re.compile(rb"(failures|errors|unexpected successes)=(\d+)")


class SuiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of `unittest`."""

    num_tests: int
    num_passed: int
    is_solved: bool


def read_report(done: CommandFinished) -> SuiteReport:
    """Read the closing lines of `python -m unittest`; without them no test passed."""
    output = done.stdout + b"\n" + done.stderr
    ran = _RAN.findall(output)
    num_tests = int(ran[-1]) if ran else 0
    failed = _FAILED.findall(output)
    num_failed = sum(int(n) for _, n in _COUNT.findall(failed[-1])) if failed else 0
    is_ok = bool(_OK.search(output)) and not failed
    is_solved = is_ok and num_tests > 0 and done.exit_code == 0 and not done.timed_out
    num_passed = max(0, num_tests - num_failed) if is_ok or failed else 0
    return SuiteReport(num_tests=num_tests, num_passed=num_passed, is_solved=is_solved)
