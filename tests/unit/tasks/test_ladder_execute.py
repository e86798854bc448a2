import time

import pytest

from penstock.examples.quickstart.ladder.dry_run import (
    LineLimitError,
    call_bounded,
    load,
    outcome,
    run_program,
)


def test_a_loop_without_end_is_stopped():
    function = load("def f():\n    while True:\n        pass", "f")
    with pytest.raises(LineLimitError):
        call_bounded(function)
    assert outcome(function, ()) == (False, "LineLimitError")


def test_numbers_that_grow_without_bound_are_stopped(monkeypatch):
    monkeypatch.setattr("penstock.examples.quickstart.ladder.dry_run._CPU_S_MAX", 0.05)
    function = load("def f(a, b):\n    while b:\n        a, b = b, a * b", "f")
    started = time.monotonic()
    assert outcome(function, (3, 5)) == (False, "LineLimitError")
    assert time.monotonic() - started < 30


def test_arguments_are_copied():
    function = load("def f(xs):\n    xs.append(1)\n    return xs", "f")
    given = [0]
    assert outcome(function, (given,)) == (True, "[0, 1]")
    assert given == [0]


def test_a_program_imports_only_its_own_files():
    files = {
        "one.py": "value = 3",
        "main.py": "from one import value\nprint(value)\nraise SystemExit(value)",
        "bad.py": "import os",
    }
    assert run_program(files, "main.py") == (3, "3\n")
    assert run_program(files, "bad.py") == (1, "")


def test_a_failed_assertion_is_exit_code_one():
    assert run_program({"main.py": "print('so far')\nassert 1 == 2"}, "main.py") == (1, "so far\n")


def test_a_program_that_does_not_parse_is_exit_code_one():
    assert run_program({"main.py": "def f(:"}, "main.py") == (1, "")


def test_a_starved_machine_fails_nothing(monkeypatch) -> None:
    """Time in which the thread does not run is not the code's."""
    monkeypatch.setattr("penstock.examples.quickstart.ladder.dry_run._CPU_S_MAX", 0.05)
    function = load("import time\ndef wait():\n    time.sleep(0.2)\n    return 1\n", "wait")
    assert outcome(function, ()) == (True, "1")
