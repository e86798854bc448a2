"""Code under test that would be graded without being right: none of it is solved."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.envs.tasks.gates import SuiteReport, read_report
from penstock.examples.quickstart.ladder.function import CallCase
from penstock.examples.quickstart.ladder.repository import hidden_program
from penstock.messages.sandbox import ExecResult

CASES = [CallCase(([3, 1],), "[1, 3]"), CallCase(([],), "[]"), CallCase(([2, 2],), "[2, 2]")]
EXPECTED = [case.expected for case in CASES]
CHEATS = {
    "says that it passed and ends": """
import os, sys
sys.stdout.write("passed 3 of 3\\nok\\n")
sys.stdout.flush()
os._exit(0)
""",
    "exits with 0 on import": "raise SystemExit(0)",
    "exits with 0 at the end": """
import atexit, os
atexit.register(os._exit, 0)
def f(values): raise BaseException
""",
    "prints what it returns": """
def f(values):
    print("[1, 3]")
""",
    "patches repr, print and str": """
import builtins
class Equal(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
builtins.repr = lambda value: Equal("x")
def f(values): return values
""",
    "returns what equals everything": """
class Any:
    def __eq__(self, other): return True
    def __repr__(self): return "x"
def f(values): return Any()
""",
    "looks for what is expected": """
import sys
def f(values):
    return sys._getframe(1).f_globals["expected"]
""",
    "knows one case": "def f(values): return [1, 3]",
}


def grade(folder: Path, source: str) -> SuiteReport:
    (folder / "m.py").write_text(source)
    (folder / "_hidden.py").write_text(hidden_program([("m.py", "f", CASES)]))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "_hidden.py"], cwd=folder, capture_output=True, check=False
    )
    result = ExecResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)
    return read_report(result, EXPECTED)


def test_right_code_is_solved_even_if_it_prints(tmp_path: Path) -> None:
    report = grade(tmp_path, "def f(values):\n    print('debug')\n    return sorted(values)\n")
    assert report == SuiteReport(num_passed=3, num_tests=3, is_solved=True)


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_not_solved(tmp_path: Path, cheat: str) -> None:
    report = grade(tmp_path, CHEATS[cheat])
    assert not report.is_solved
    assert report.num_passed <= 1


def test_nothing_in_the_program_tells_a_result() -> None:
    other = [CallCase(case.arguments, "other") for case in CASES]
    assert hidden_program([("m.py", "f", CASES)]) == hidden_program([("m.py", "f", other)])
