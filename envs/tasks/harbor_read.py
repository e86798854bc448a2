"""Harbor folders, in: strictly, with the file and the field in every error.

A folder that Penstock wrote comes back as it was. A foreign one is graded by its own verifier. Its
Dockerfile is not built: what `COPY` and `ADD` bring into the working directory is taken; all else
comes from an image layer, which the task names as its `docker_image`.

Source: Harbor's task format (harborframework.com/docs/tasks).
"""

import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from penstock.envs.egress.rules import EgressRuleError, parse_rules
from penstock.envs.microvm.images.layers import pinned
from penstock.envs.tasks.apart.programs import TESTS_FOLDER
from penstock.envs.tasks.harbor import (
    APART_FOLDER,
    EXPECTED_FILE,
    INSTRUCTION_FILE,
    OWN_FOLDER,
    SOLUTION_FOLDER,
    START_FOLDER,
    TASK_FILE,
    TestsFile,
    start_files,
)
from penstock.envs.tasks.harbor_foreign import Verifier, foreign_hidden
from penstock.envs.tasks.source import TaskCandidate, TaskOrigin
from penstock.messages.errors import PenstockError
from penstock.messages.task import HiddenTests, Limits, Split, Task

ENVIRONMENT = "environment"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FILES_MAX = 2_000
FILES_BYTES_MAX = 8 << 20


class MalformedTaskError(PenstockError, ValueError):
    """A task's folder is not as the format asks; the text names the file and what was expected."""


def read_harbor(folder: Path, *, egress_addresses: bool = False) -> TaskCandidate:
    """Read one task.

    Args:
        folder: Of the task.
        egress_addresses: Whether its allow-list may name addresses, private ones included.

    Raises:
        MalformedTaskError: A part is missing, does not parse, has a wrong type, is too large, or
            leads out of the folder.

    """
    settings = _settings(folder)
    instruction = _text(folder, INSTRUCTION_FILE)
    if not instruction.strip():
        raise MalformedTaskError(
            f"{folder / INSTRUCTION_FILE}: expected an instruction, it is empty"
        )
    own = settings.get("metadata", {}).get("penstock", {})
    if not isinstance(own, dict):
        raise MalformedTaskError(f"{folder / TASK_FILE}: metadata.penstock: expected a table")
    task_id = str(own.get("task_id", folder.name))
    task = Task(
        task_id=task_id,
        category=str(own.get("category", "harbor")),
        split=_converted(folder, own.get("split", "train"), Split, "metadata.penstock.split"),
        instruction=instruction.removesuffix("\n"),
        files=_start(folder),
        limits=_limits(folder, settings, own),
        egress=_egress(folder, own, allows_addresses=egress_addresses),
        image=_image(folder, settings, own),
    )
    is_foreign = not (folder / "tests" / EXPECTED_FILE).is_file()
    read_hidden = _foreign_hidden if is_foreign else _hidden
    hidden = read_hidden(folder, task_id, settings)
    origin = _converted(
        folder,
        own.get("origin", {"source": "harbor", "repository": folder.name, "kind": "harbor"}),
        TaskOrigin,
        "metadata.penstock.origin",
    )
    return TaskCandidate(task=task, hidden=hidden, origin=origin)


def read_harbor_set(root: Path, *, egress_addresses: bool = False) -> list[TaskCandidate]:
    """Read every task folder below a root, by name.

    Args:
        root: Holds the folders.
        egress_addresses: See `read_harbor`.

    Raises:
        MalformedTaskError: One of them is malformed, two have one id, or there is none.

    """
    folders = sorted(path.parent for path in root.glob(f"*/{TASK_FILE}"))
    if not folders:
        raise MalformedTaskError(f"{root}: expected task folders, each with a {TASK_FILE}")
    candidates: dict[str, TaskCandidate] = {}
    for folder in folders:
        candidate = read_harbor(folder, egress_addresses=egress_addresses)
        if candidates.setdefault(candidate.task.task_id, candidate) is not candidate:
            words = f"metadata.penstock.task_id: {candidate.task.task_id!r} is another task's"
            raise MalformedTaskError(f"{folder / TASK_FILE}: {words}")
    return list(candidates.values())


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / TASK_FILE
    try:
        settings = tomllib.loads(_text(folder, TASK_FILE))
    except (ValueError, RecursionError) as error:
        raise MalformedTaskError(f"{path}: {error}") from error
    version = settings.get("version", settings.get("schema_version"))
    if not isinstance(version, str) or not version.startswith("1."):
        raise MalformedTaskError(f"{path}: version: expected '1.x', got {version!r}")
    for name in ("metadata", "verifier", "agent", "environment"):
        if not isinstance(settings.get(name, {}), dict):
            raise MalformedTaskError(f"{path}: {name}: expected a table")
    return settings


def _egress(folder: Path, own: dict[str, Any], *, allows_addresses: bool) -> list[str]:
    field = "metadata.penstock.egress"
    rules: list[str] = _converted(folder, own.get("egress", []), list[str], field)
    try:
        parse_rules(rules, allows_addresses=allows_addresses)
    except EgressRuleError as error:
        raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {error}") from error
    return rules


def _image(folder: Path, settings: dict[str, Any], own: dict[str, Any]) -> str:
    """Return the image that Penstock's own field names, else the one that Harbor would pull."""
    field, image = "metadata.penstock.image", own.get("image")
    if "image" not in own:
        field, image = (
            "environment.docker_image",
            settings.get("environment", {}).get("docker_image"),
        )
    if not image:
        return ""
    reference: str = _converted(folder, image, str, field)
    return pinned(reference)


def _limits(folder: Path, settings: dict[str, Any], own: dict[str, Any]) -> Limits:
    if "limits" in own:
        return _converted(folder, own["limits"], Limits, "metadata.penstock.limits")
    return Limits(wall_s_max=_timeout_s(folder, settings, "agent"))


def _timeout_s(folder: Path, settings: dict[str, Any], table: str) -> float:
    value = settings.get(table, {}).get("timeout_sec", 120.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        where = f"{folder / TASK_FILE}: {table}.timeout_sec"
        raise MalformedTaskError(f"{where}: expected seconds, 0 < x <= 3600, got {value!r}")
    return float(value)


def _start(folder: Path) -> dict[str, str]:
    if (folder / START_FOLDER).is_dir():
        return _tree(folder, START_FOLDER)
    if not (folder / ENVIRONMENT).is_dir():
        return {}
    context = _tree(folder, ENVIRONMENT)
    return start_files(context.pop("Dockerfile", ""), context)


def _foreign_hidden(folder: Path, task_id: str, settings: dict[str, Any]) -> HiddenTests:
    _text(folder, "tests/test.sh")
    tests = _tree(folder, "tests")
    solution = _tree(folder, "solution") if (folder / "solution").is_dir() else {}
    own = settings.get("metadata", {}).get("penstock", {})
    is_separated: bool = _converted(
        folder, own.get("separated", False), bool, "metadata.penstock.separated"
    )
    verifier = Verifier(
        env=_verifier_env(folder, settings),
        timeout_s=_timeout_s(folder, settings, "verifier"),
        is_separated=is_separated,
    )
    return foreign_hidden(task_id, tests, solution, verifier)


def _verifier_env(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    field = "verifier.env"
    env = settings.get("verifier", {}).get("env", {})
    variables: dict[str, str] = _converted(folder, env, dict[str, str], field)
    for name, value in variables.items():
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            words = f"expected {_VARIABLE.pattern} and no zero byte, got {name!r}"
            raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {words}")
    return variables


def _hidden(folder: Path, task_id: str, settings: dict[str, Any]) -> HiddenTests:
    path = f"tests/{EXPECTED_FILE}"
    gold = _tree(folder, SOLUTION_FOLDER) if (folder / SOLUTION_FOLDER).is_dir() else {}
    try:
        tests = msgspec.json.decode(_text(folder, path), type=TestsFile)
    except (ValueError, RecursionError) as error:
        raise MalformedTaskError(f"{folder / path}: {error}") from error
    if not tests.argv or not tests.expected:
        raise MalformedTaskError(f"{folder / path}: argv, expected: expected at least one entry")
    return HiddenTests(
        task_id=task_id,
        files=_own_tests(folder, tests),
        argv=tests.argv,
        expected=tests.expected,
        timeout_s=_timeout_s(folder, settings, "verifier"),
        gold_files=gold,
        sealed_modules=tests.sealed_modules,
        peer=tests.peer,
    )


def _own_tests(folder: Path, tests: TestsFile) -> dict[str, str]:
    """Return the tests' files, by path in the working directory or in the verifier's folder."""
    if not tests.peer:
        return _tree(folder, OWN_FOLDER)
    apart = _tree(folder, APART_FOLDER)
    return {f"{TESTS_FOLDER}/{path}": text for path, text in apart.items()}


def _tree(folder: Path, below: str) -> dict[str, str]:
    """Read the files of a folder; a link, or anything that leads out, is refused."""
    base = folder / below
    if not base.is_dir():
        raise MalformedTaskError(f"{base}: expected a folder")
    files: dict[str, str] = {}
    num_bytes = 0
    for path in sorted(base.rglob("*")):
        _check_inside(path, folder)
        if path.is_dir():
            continue
        name = str(PurePosixPath(path.relative_to(base)))
        files[name] = _text(folder, f"{below}/{name}")
        num_bytes += len(files[name])
        if len(files) > FILES_MAX or num_bytes > FILES_BYTES_MAX:
            raise MalformedTaskError(
                f"{base}: more than {FILES_MAX} files or {FILES_BYTES_MAX} bytes"
            )
    return files


def _text(folder: Path, name: str) -> str:
    path = folder / name
    _check_inside(path, folder)
    if not path.is_file():
        raise MalformedTaskError(f"{path}: expected a file")
    if path.stat().st_size > FILES_BYTES_MAX:
        raise MalformedTaskError(f"{path}: expected at most {FILES_BYTES_MAX} bytes")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise MalformedTaskError(f"{path}: expected UTF-8 text: {error}") from error


def _check_inside(path: Path, folder: Path) -> None:
    if path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):
        raise MalformedTaskError(f"{path}: a link, or out of the task's folder")


def _converted(folder: Path, value: object, kind: Any, field: str) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {error}") from error
