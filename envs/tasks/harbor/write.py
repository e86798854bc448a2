"""Tasks as Harbor folders: the layout, and the writer.

```
 <task>/task.toml  instruction.md
        environment/Dockerfile, files/...      what the agent starts from
        tests/test.sh, penstock.json, ...      the verifier; writes /logs/verifier/reward.txt
        solution/solve.sh, files/...           the known solution
```
`tests/penstock.json` holds what the hidden tests must print: the verifier compares in a process of
its own, after the code under test has ended. Foreign tasks: `foreign.py`.

Source: Harbor's task format, version 1.0 (harborframework.com/docs/tasks).
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.envs.microvm.images.layers import DIGEST
from penstock.envs.tasks.apart.programs import TESTS_FOLDER
from penstock.envs.tasks.harbor.foreign import foreign_files, verifier_env
from penstock.envs.tasks.source import TaskCandidate, difficulty, difficulty_label
from penstock.messages.errors import PenstockError
from penstock.messages.task import FileKind, FileState, HiddenTests, ModuleName, Split, Task

VERSION = "1.0"
TASK_FILE, INSTRUCTION_FILE, EXPECTED_FILE = "task.toml", "instruction.md", "penstock.json"
START_FOLDER, SOLUTION_FOLDER = "environment/files", "solution/files"
OWN_FOLDER, APART_FOLDER = "tests/files", "tests/apart"
_DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /work\nCOPY files/ /work/\n"
_SOLVE = '#!/bin/sh\nset -e\ncp -R "$(dirname "$0")"/files/. /work/\n'
_TEST = """\
#!/bin/sh
mkdir -p /logs/verifier
{copy}cd /work && {command} > /logs/verifier/results.txt 2> /logs/verifier/errors.txt
code=$?
exec python3 -I - "$code" <<'PYTHON'
import json, sys
expected = json.load(open("/tests/penstock.json"))["expected"]
lines = open("/logs/verifier/results.txt", errors="replace").read().removesuffix("\\n").split("\\n")
reward = int(sys.argv[1] == "0" and lines[-len(expected):] == expected)
open("/logs/verifier/reward.txt", "w").write(str(reward))
PYTHON
"""


class TestsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tests/penstock.json`."""

    argv: list[str]
    expected: list[str]
    sealed_modules: list[ModuleName] = []
    peer: list[str] = []


_NO_PLACE = ("steps", "has_setup", "pages", "call_sleep_s")
"""Fields of a task that the folders written here do not have."""


class UnwritableTaskError(PenstockError, ValueError):
    """A task has what a folder would lose; the text names the field."""


def folder_name(task_id: str) -> str:
    """Return a safe folder name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", task_id).strip(".") or "task"


def harbor_files(candidate: TaskCandidate, split: Split) -> dict[str, bytes]:
    """Return every file of a task's folder by its path in it.

    Raises:
        UnwritableTaskError: The folder would lack a part of the task.

    """
    task = candidate.task
    plain = Task(task_id="", category="", split=split, instruction="", files={})
    for name in _NO_PLACE:
        if getattr(task, name) != getattr(plain, name):
            text = "expected none: a folder as written here has no place for it"
            raise UnwritableTaskError(f"task {task.task_id}: {name}: {text}")
    files = {
        TASK_FILE: _task_toml(candidate, split).encode(),
        INSTRUCTION_FILE: f"{task.instruction.rstrip(chr(10))}\n".encode(),
        "environment/Dockerfile": _DOCKERFILE.encode(),
    }
    files |= _below(START_FOLDER, task.contents)
    return files | (foreign_files(candidate.hidden) or _own_files(candidate.hidden))


def _own_files(hidden: HiddenTests) -> dict[str, bytes]:
    """Return `tests` and `solution` of a task whose results are compared."""
    tests = TestsFile(
        argv=hidden.argv,
        expected=hidden.expected,
        sealed_modules=hidden.sealed_modules,
        peer=hidden.peer,
    )
    encoded = msgspec.json.format(msgspec.json.encode(tests), indent=1)
    command = " ".join(_quoted(word) for word in hidden.argv)
    files = {
        "tests/test.sh": _TEST.replace("{command}", command)
        .replace("{copy}", "" if hidden.peer else "cp -R /tests/files/. /work/\n")
        .encode(),
        f"tests/{EXPECTED_FILE}": encoded + b"\n",
        "solution/solve.sh": _SOLVE.encode(),
    }
    own = {path.removeprefix(f"{TESTS_FOLDER}/"): data for path, data in hidden.contents.items()}
    files |= _below(APART_FOLDER if hidden.peer else OWN_FOLDER, own)
    return files | _below(SOLUTION_FOLDER, hidden.gold_contents)


def write_harbor(candidate: TaskCandidate, split: Split, root: Path) -> Path:
    """Write a task's folder below `root` and return it; an earlier one must not be there.

    Raises:
        FileExistsError: A folder of that name is there.
        UnwritableTaskError: See `harbor_files`; nothing is written.

    """
    files = harbor_files(candidate, split)
    folder = root / folder_name(candidate.task.task_id)
    folder.mkdir(parents=True)
    for path, data in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    is_own = foreign_files(candidate.hidden) is None
    for path in ("tests/test.sh", "solution/solve.sh") if is_own else ():
        (folder / path).chmod(0o755)
    hidden, tests = candidate.hidden, APART_FOLDER if candidate.hidden.peer else OWN_FOLDER
    _write_states(folder, START_FOLDER, candidate.task.states)
    _write_states(folder, tests if is_own else "tests", hidden.states)
    _write_states(folder, SOLUTION_FOLDER if is_own else "solution", hidden.gold_states)
    return folder


_PLACES = re.compile(rb"(/tests/apart|/tests|/solution)/")
"""Where tests and solutions lie in a machine."""


def _write_states(folder: Path, below: str, states: Sequence[FileState]) -> None:
    """Make what the bytes of files do not say; modes of folders last, or nothing fits into them."""

    def place_of(path: bytes) -> Path:
        return folder / below / os.fsdecode(_PLACES.sub(b"", path, count=1))

    folders = [one for one in states if one.kind is FileKind.FOLDER]
    for one in folders:
        place_of(one.path).mkdir(parents=True, exist_ok=True)
    for one in states:
        place = place_of(one.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if one.kind is FileKind.LINK:
            place.symlink_to(os.fsdecode(one.target))
        elif one.kind is FileKind.HARD_LINK:
            place.hardlink_to(place_of(one.target))
        elif one.kind is FileKind.FILE:
            if one.data is not None:
                place.write_bytes(one.data)
            place.chmod(one.mode)
    for one in sorted(folders, key=lambda one: -one.path.count(b"/")):
        place_of(one.path).chmod(one.mode)


def _task_toml(candidate: TaskCandidate, split: Split) -> str:
    task, origin = candidate.task, candidate.origin
    limits = {name: getattr(task.limits, name) for name in task.limits.__struct_fields__}
    penstock: dict[str, object] = {
        "task_id": task.task_id, "category": task.category, "split": split.value
    }  # fmt: skip
    if task.egress:
        penstock["egress"] = task.egress
    if foreign_files(candidate.hidden) is not None and candidate.hidden.peer:
        penstock["separated"] = True
    if task.image:
        penstock["image"] = f"sha256:{task.image}" if DIGEST.fullmatch(task.image) else task.image
    origins = {name: getattr(origin, name) for name in origin.__struct_fields__}
    tables: dict[str, Mapping[str, object]] = {
        "metadata": {
            "difficulty": difficulty_label(origin),
            "category": "programming",
            "tags": [origin.source, origin.kind],
        },
        "metadata.penstock": penstock | {"difficulty_estimate": round(difficulty(origin), 3)},
        "metadata.penstock.limits": limits,
        "metadata.penstock.machine": msgspec.structs.asdict(task.machine),
        "metadata.penstock.origin": origins,
        "verifier": {"timeout_sec": candidate.hidden.timeout_s},
        "agent": {"timeout_sec": task.limits.wall_s_max},
        "environment": {"build_timeout_sec": 600.0, "cpus": 1, "memory_mb": 512,
                        "allow_internet": False},
    }  # fmt: skip
    if foreign_files(candidate.hidden) is not None and verifier_env(candidate.hidden):
        tables["verifier.env"] = verifier_env(candidate.hidden)
    sections = [
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    ]
    return f'version = "{VERSION}"\n\n' + "\n".join(sections)


def _toml(value: object) -> str:
    """Write a text, number, truth value or list of texts: JSON's form of these is TOML's too."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _below(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{path}": data for path, data in files.items()}


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[\w./=-]+", word) else "'" + word.replace("'", "'\\''") + "'"
