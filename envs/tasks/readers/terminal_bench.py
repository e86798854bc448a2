"""Terminal-bench 1 folders, as Harbor's own mapper turns them into its format.

```
 task.yaml      instruction, limits      solution.sh   known solution
 Dockerfile     and what it copies       run-tests.sh  verifier: its exit code is the reward
 tests/         copied to /tests, which TEST_DIR names
```
Source: `TerminalBenchMapper` of Harbor; `TrialHandler` of terminal-bench 0.2.
"""

from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.tasks.harbor.folder import (
    SETTINGS_BYTES_MAX,
    MalformedTaskError,
    Tree,
    plain_tree,
    read_text,
    read_tree,
    split_tree,
)
from penstock.envs.tasks.harbor.foreign import Verifier, foreign_hidden
from penstock.envs.tasks.harbor.read import ReadOptions
from penstock.envs.tasks.images import DOCKERFILE, start_of
from penstock.envs.tasks.source import TaskCandidate, TaskOrigin
from penstock.messages.task import Limits, MachineNeeds, Split, Task

YAML_FILE, RUN_TESTS, SOLUTION = "task.yaml", "run-tests.sh", "solution.sh"
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml")
_SOLUTIONS = (SOLUTION, "solution.yaml")
_SERVICES_MAX = 1
_VERIFY = f"""\
mkdir -p /logs/verifier
cd /app && bash /tests/{RUN_TESTS}
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
_Seconds = float | int


class _Settings(msgspec.Struct, frozen=True):
    """Content of `task.yaml`; other fields are metadata."""

    instruction: str
    category: str = "terminal-bench"
    max_agent_timeout_sec: _Seconds = 360.0
    max_test_timeout_sec: _Seconds = 60.0
    descriptions: list[dict[str, Any]] = []


def read_terminal_bench(folder: Path, options: ReadOptions) -> TaskCandidate:
    """Read one task.

    Raises:
        MalformedTaskError: A part is missing or malformed, or the task has several services.

    """
    settings, unknown = _settings(folder)
    reasons = [reason for name in COMPOSE_FILES for reason in _services(folder, name)]
    tests = plain_tree({"test.sh": _VERIFY.encode()}, 0o755)
    if (folder / "tests").is_dir():
        tests |= read_tree(folder, "tests")
    tests[RUN_TESTS] = plain_tree({RUN_TESTS: read_text(folder, RUN_TESTS).encode()})[RUN_TESTS]
    solution: Tree = {}
    if (folder / SOLUTION).is_file():
        solution = plain_tree({"solve.sh": read_text(folder, SOLUTION).encode()}, 0o755)
    try:
        image, start = _start(folder)
    except MalformedTaskError as error:
        raise MalformedTaskError(
            *reasons, *error.reasons, image=None if reasons else error.image
        ) from error
    if reasons:
        raise MalformedTaskError(*reasons)
    parts = split_tree(start)
    task = Task(
        task_id=folder.name,
        category=settings.category[:64] or "terminal-bench",
        split=Split.TRAIN,
        instruction=settings.instruction.strip(),
        files=parts.files,
        binaries=parts.binaries,
        states=parts.states,
        limits=Limits(wall_s_max=_seconds(folder, settings, "max_agent_timeout_sec", 86_400.0)),
        egress=[] if options.is_offline else list(options.internet),
        image=image,
        machine=MachineNeeds(isolation_min=options.isolation_min),
    )
    verifier = Verifier(
        env={"TEST_DIR": "/tests"},
        timeout_s=_seconds(folder, settings, "max_test_timeout_sec", 3_600.0),
        is_separated=False,
    )
    hidden = msgspec.structs.replace(
        foreign_hidden(task.task_id, tests, solution, verifier), egress=task.egress
    )
    origin = TaskOrigin(source="terminal-bench", repository=folder.name, kind="terminal-bench")
    adapted = [f"{name}: kept, without effect" for name in unknown]
    return TaskCandidate(task=task, hidden=hidden, origin=origin, adapted=adapted)


def _settings(folder: Path) -> tuple[_Settings, list[str]]:
    path = folder / YAML_FILE
    text = read_text(folder, YAML_FILE, SETTINGS_BYTES_MAX)
    try:
        found = msgspec.yaml.decode(text)
        settings = msgspec.convert(found, _Settings)
    except ImportError as error:
        raise MalformedTaskError(f"{path}: {error}: pip install pyyaml") from error
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise MalformedTaskError(f"{path}: {error}") from error
    if not settings.instruction.strip():
        raise MalformedTaskError(f"{path}: instruction: expected one, it is empty")
    return settings, sorted(set(found) - set(_Settings.__struct_fields__))


def _seconds(folder: Path, settings: _Settings, field: str, maximum: float) -> float:
    value = float(getattr(settings, field))
    if not 0 < value <= maximum:
        text = f"expected seconds, 0 < x <= {maximum:g}, got {value:g}"
        raise MalformedTaskError(f"{folder / YAML_FILE}: {field}: {text}")
    return value


def _services(folder: Path, name: str) -> list[str]:
    """Return what is wrong with a compose file, which must have exactly one service."""
    if not (folder / name).exists():
        return []
    try:
        found = msgspec.yaml.decode(read_text(folder, name, SETTINGS_BYTES_MAX))
        services = found["services"]
        num_services = len(services)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        return [f"{folder / name}: expected services: {error}"]
    if num_services == _SERVICES_MAX:
        return []
    text = f"expected one service, which is the machine, got {num_services}"
    return [f"{folder / name}: services: {text}"]


def _start(folder: Path) -> tuple[str, Tree]:
    if not (folder / DOCKERFILE).exists():
        return "", {}
    context = read_tree(folder, ".")
    context = {path: one for path, one in context.items() if path not in _SOLUTIONS}
    return start_of(folder, folder, context, hidden=_SOLUTIONS)
