"""SWE-bench and its relatives (SWE-smith, SWE-rebench, SWE-Gym): JSON lines or Parquet.

```
 instance ─▶ image of its repository at `base_commit` (`image_name`, `docker_image`, or by its id)
   problem_statement ─▶ instruction
   test_patch ─▶ applied before the tests, over whatever the episode did to those files
   FAIL_TO_PASS, PASS_TO_PASS ─▶ tests that pytest must report as passed: the reward is 0 or 1
   patch ─▶ the known solution (SWE-smith: the bug, so the solution is its reverse)
```
An image has the repository in `/testbed`. Source: `swebench.harness` 4; the data sets' cards.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.tasks.harbor.folder import MalformedTaskError, Tree, plain_tree
from penstock.envs.tasks.harbor.foreign import Verifier, foreign_hidden
from penstock.envs.tasks.harbor.read import ReadOptions
from penstock.envs.tasks.images import named_image
from penstock.envs.tasks.readers.source import TaskEntry
from penstock.envs.tasks.source import TaskCandidate, TaskOrigin
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.task import Limits, MachineNeeds, Split, Task

SUFFIXES = (".jsonl", ".parquet")
LINE_BYTES_MAX = 8 << 20
INSTANCES_MAX = 1_000_000
TESTS_MAX = 50_000
AGENT_S, VERIFIER_S = 1_800.0, 1_800.0
_COMMAND = "python -m pytest -rA --tb=no -p no:cacheprovider"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SMITH = "swesmith"
_VERIFY = """\
cd /testbed || exit 1
source /opt/miniconda3/bin/activate 2> /dev/null && conda activate testbed
git apply -v /tests/test.patch
mkdir -p /logs/verifier
{command} > /tests/output.txt 2>&1
cat /tests/output.txt
python /tests/compare.py
"""
_COMPARE = """\
import json, re
wanted = json.load(open("/tests/wanted.json"))
found = {}
ends = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
for line in map(str.strip, open("/tests/output.txt", errors="replace")):
    if told := re.match(ends + r" (\\S.*?)(?: - .*)?$", line):
        found[told[2]] = told[1]
    elif told := re.match(r"(\\S+::\\S.*?) " + ends, line):
        found.setdefault(told[1], told[2])
missed = [one for one in wanted if found.get(one) not in ("PASSED", "XFAIL")]
print(len(wanted) - len(missed), "of", len(wanted), "tests pass; not:", missed[:20])
open("/logs/verifier/reward.txt", "w").write(str(int(not missed)))
"""
_SOLVE = "cd /testbed && git apply {options} /solution/gold.patch\n"


class SweSource:
    """Instances of one file."""

    format = "swe"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path, self._options = path, options

    def entries(self) -> Iterator[TaskEntry]:
        """See `TaskCollection.entries`."""
        rows = _parquet(self._path) if self._path.suffix == ".parquet" else _lines(self._path)
        for number, row in enumerate(rows, 1):
            if number > INSTANCES_MAX:
                raise MalformedTaskError(f"{self._path}: more than {INSTANCES_MAX} instances")
            where = f"{self._path}: instance {number}"
            name = row.get("instance_id") if isinstance(row, dict) else None
            read = partial(read_instance, row, where, self._options)
            yield TaskEntry(name=str(name or number)[:200], read=read)


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES_MAX + 1):
            if len(line) > LINE_BYTES_MAX:
                raise MalformedTaskError(f"{path}: expected lines of {LINE_BYTES_MAX} bytes")
            if line.strip():
                try:
                    yield parse_json(line, object, "line")
                except CodecError as error:
                    yield f"no JSON: {error}"


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=100):
                yield from batch.to_pylist()
    except ImportError as error:
        raise MalformedTaskError(f"{path}: {error}: pip install pyarrow") from error
    except (OSError, ValueError) as error:  # pyarrow's errors derive from both.
        raise MalformedTaskError(f"{path}: no Parquet: {error}") from error


def read_instance(row: Any, where: str, options: ReadOptions) -> TaskCandidate:
    """Read one instance.

    Raises:
        MalformedTaskError: A field is missing or malformed, or its image is missing.

    """
    if not isinstance(row, dict):
        raise MalformedTaskError(f"{where}: expected an object, got {row!a:.100}")
    instance = _text(row, "instance_id", where)
    if _ID.fullmatch(instance) is None:
        text = f"expected letters, digits, '.', '_' and '-', got {instance!a:.100}"
        raise MalformedTaskError(f"{where}: instance_id: {text}")
    where = f"{where} ({instance})"
    wanted = [*_names(row, "FAIL_TO_PASS", where), *_names(row, "PASS_TO_PASS", where)]
    if not wanted:
        raise MalformedTaskError(f"{where}: FAIL_TO_PASS: expected at least one test")
    image = named_image(image_name(row), where)
    egress = [] if options.is_offline else list(options.internet)
    task = Task(
        task_id=instance,
        category="swe",
        split=Split.TRAIN,
        instruction=_text(row, "problem_statement", where),
        files={},
        limits=Limits(wall_s_max=AGENT_S),
        image=image,
        machine=MachineNeeds(isolation_min=options.isolation_min),
    )
    verifier = Verifier(env={}, timeout_s=VERIFIER_S, is_separated=False)
    hidden = foreign_hidden(instance, _tests(row, wanted, where), _solution(row, where), verifier)
    origin = TaskOrigin(source="swe", repository=str(row.get("repo", instance)), kind="commit")
    hidden = msgspec.structs.replace(hidden, egress=egress)
    return TaskCandidate(task=task, hidden=hidden, origin=origin)


def image_name(row: Mapping[str, Any]) -> str:
    """Return the image of an instance: its own field, or the name that SWE-bench's harness uses."""
    for field in ("image_name", "docker_image", "image"):
        if isinstance(name := row.get(field), str) and name:
            return name
    instance = str(row["instance_id"]).lower().replace("__", "_1776_")
    return f"swebench/sweb.eval.x86_64.{instance}:latest"


def _is_smith(row: Mapping[str, Any]) -> bool:
    """Return whether an instance's patch introduces the bug instead of fixing it."""
    return _SMITH in image_name(row) or (
        "test_patch" not in row and str(row.get("repo", "")).startswith("swesmith/")
    )


def _tests(row: Mapping[str, Any], wanted: list[str], where: str) -> Tree:
    patch = row.get("test_patch") or ""
    if not isinstance(patch, str):
        raise MalformedTaskError(f"{where}: test_patch: expected a text")
    files = sorted({name.partition("::")[0] for name in wanted if "::" in name})
    command = " ".join([_COMMAND, *(json.dumps(name) for name in files)])
    if isinstance(row.get("test_cmd"), str):
        command = row["test_cmd"]
    texts = {
        "test.sh": _VERIFY.replace("{command}", command),
        "test.patch": patch,
        "compare.py": _COMPARE,
        "wanted.json": json.dumps(wanted),
    }
    return plain_tree({name: text.encode("utf-8", "replace") for name, text in texts.items()})


def _solution(row: Mapping[str, Any], where: str) -> Tree:
    patch = _text(row, "patch", where)
    solve = _SOLVE.format(options="-R" if _is_smith(row) else "")
    return plain_tree({"gold.patch": patch.encode("utf-8", "replace"), "solve.sh": solve.encode()})


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise MalformedTaskError(f"{where}: {field}: expected a text, got {value!a:.60}")
    return value


def _names(row: Mapping[str, Any], field: str, where: str) -> list[str]:
    """Return a list of tests, which some data sets write as JSON text."""
    value = row.get(field, row.get(field.lower(), []))
    if isinstance(value, str):
        try:
            value = parse_json(value, list[str], field)
        except CodecError as error:
            raise MalformedTaskError(f"{where}: {field}: expected a list: {error}") from error
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise MalformedTaskError(f"{where}: {field}: expected a list of texts")
    if len(value) > TESTS_MAX:
        raise MalformedTaskError(f"{where}: {field}: expected at most {TESTS_MAX} tests")
    return value
