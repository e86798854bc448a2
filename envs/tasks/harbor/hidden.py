"""What grades a task of a Harbor folder: its own verifier, or results that are compared."""

import re
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.python_source import PythonSourceError, parse_python
from penstock.envs.tasks.apart.programs import TESTS_FOLDER
from penstock.envs.tasks.harbor.folder import (
    MalformedTaskError,
    Tree,
    below,
    read_text,
    read_tree,
    split_tree,
)
from penstock.envs.tasks.harbor.foreign import Verifier, foreign_hidden
from penstock.envs.tasks.harbor.schema import HarborFields
from penstock.envs.tasks.harbor.steps import read_step_tests
from penstock.envs.tasks.harbor.write import (
    APART_FOLDER,
    EXPECTED_FILE,
    OWN_FOLDER,
    SOLUTION_FOLDER,
    TASK_FILE,
    TestsFile,
)
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.task import HiddenTests

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEFAULTED = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*:-([^${}]*)\}")
"""A variable of the host's with a default, which is taken: a task gets nothing of the host's."""
VARIABLES_MAX = 64
RESULTS_MAX = 10_000


def is_foreign(folder: Path, fields: HarborFields) -> bool:
    """Return whether a task's folder is none that Penstock wrote."""
    return bool(fields.steps) or not (folder / "tests" / EXPECTED_FILE).is_file()


def read_hidden(folder: Path, task_id: str, fields: HarborFields) -> HiddenTests:
    """Read what grades a task.

    Raises:
        MalformedTaskError: A part is missing or wrong, or a test is no Python.

    """
    read = _foreign_hidden if is_foreign(folder, fields) else _hidden
    hidden = read(folder, task_id, fields)
    for one in (hidden, *hidden.steps):
        for path, data in one.contents.items():  # Broken tests are no evidence about a policy.
            if path.endswith(".py"):
                try:
                    parse_python(data)
                except PythonSourceError as error:
                    raise MalformedTaskError(f"{folder}: hidden test {path} {error}") from error
    return hidden


def converted(folder: Path, value: object, kind: Any, field: str) -> Any:
    """Return a value of `task.toml` as a type.

    Raises:
        MalformedTaskError: It is none; the text names file and field.

    """
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {error}") from error


def _foreign_hidden(folder: Path, task_id: str, fields: HarborFields) -> HiddenTests:
    own = fields.metadata.get("penstock", {})
    is_separated: bool = converted(
        folder, own.get("separated", False), bool, "metadata.penstock.separated"
    )
    verifier = Verifier(
        env=_variables(folder, "verifier.env", fields.verifier.env),
        solution_env=_variables(folder, "solution.env", fields.solution.env),
        timeout_s=fields.verifier_s,
        is_separated=is_separated,
    )
    if fields.steps:
        for number, step in enumerate(fields.steps):
            own_env = _variables(folder, f"steps[{number}].verifier.env", step.verifier.env)
            step.verifier.env.update(own_env)
        return read_step_tests(folder, task_id, fields, verifier)
    read_text(folder, "tests/test.sh")
    tests = read_tree(folder, "tests")
    solution = read_tree(folder, "solution") if (folder / "solution").is_dir() else {}
    return foreign_hidden(task_id, tests, solution, verifier)


def _variables(folder: Path, field: str, variables: dict[str, str]) -> dict[str, str]:
    if len(variables) > VARIABLES_MAX:
        words = f"expected at most {VARIABLES_MAX} variables"
        raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {words}")
    for name, value in variables.items():
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            words = f"expected {_VARIABLE.pattern} and no zero byte, got {name!r}"
            raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {words}")
        if "${" in value and _DEFAULTED.fullmatch(value) is None:
            words = f"{name}: expected a value, not a variable of the host's: {value!r}"
            raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {words}")
    return {name: _DEFAULTED.sub(r"\1", value) for name, value in variables.items()}


def _hidden(folder: Path, task_id: str, fields: HarborFields) -> HiddenTests:
    path = f"tests/{EXPECTED_FILE}"
    has_gold = (folder / SOLUTION_FOLDER).is_dir()
    gold = split_tree(read_tree(folder, SOLUTION_FOLDER) if has_gold else {})
    try:
        tests = parse_json(read_text(folder, path), TestsFile, path)
    except CodecError as error:
        raise MalformedTaskError(f"{folder / path}: {error}") from error
    if not tests.argv or not 0 < len(tests.expected) <= RESULTS_MAX:
        words = f"argv, expected: expected at least one entry, at most {RESULTS_MAX}"
        raise MalformedTaskError(f"{folder / path}: {words}")
    own = split_tree(_own_tests(folder, tests))
    return HiddenTests(
        task_id=task_id,
        files=own.files,
        binaries=own.binaries,
        states=own.states,
        argv=tests.argv,
        expected=tests.expected,
        timeout_s=fields.verifier_s,
        gold_files=gold.files,
        gold_binaries=gold.binaries,
        gold_states=gold.states,
        sealed_modules=tests.sealed_modules,
        peer=tests.peer,
    )


def _own_tests(folder: Path, tests: TestsFile) -> Tree:
    """Return the tests' files, by path in the working directory or in the verifier's folder."""
    if not tests.peer:
        return read_tree(folder, OWN_FOLDER)
    return below(TESTS_FOLDER, read_tree(folder, APART_FOLDER))
