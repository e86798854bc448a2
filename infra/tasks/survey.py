"""`penstock tasks import`: surveys a collection: which tasks can be read, and why others cannot."""

import argparse
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.actors.runtime.files import write_atomic
from penstock.envs.tasks.harbor.folder import MalformedTaskError
from penstock.envs.tasks.harbor.read import ReadOptions
from penstock.envs.tasks.harbor.write import (
    TASK_FILE,
    UnwritableTaskError,
    folder_name,
    write_harbor,
)
from penstock.envs.tasks.readers.opening import open_sources
from penstock.envs.tasks.source import TaskCandidate
from penstock.infra.output import print_line, print_result

REPORT_FILE = "import.json"
ROWS_MAX = 40
_REASON_CHARACTERS_MAX = 400
_READ, _NEEDS_IMAGE, _REFUSED = "read", "needs an image", "refused"


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of reading one task."""

    name: str
    format: str
    status: str
    reasons: list[str] = []
    adapted: list[str] = []


def survey(
    path: Path, options: ReadOptions, output: Path | None = None
) -> tuple[list[TaskRow], Counter[str]]:
    """Read every task of a path; return the result of each, and how often each reason occurs.

    Args:
        path: Folder or file of tasks.
        options: How they are read.
        output: New folder for readable tasks, as Harbor folders.

    Raises:
        MalformedTaskError: The path holds no tasks.

    """
    rows: list[TaskRow] = []
    kinds: Counter[str] = Counter()
    ids: set[str] = set()
    for source in open_sources(path, options):
        for entry in source.entries():
            try:
                candidate = entry.read()
                if candidate.task.task_id in ids:
                    text = f"task_id: {candidate.task.task_id!r} is another task's"
                    raise MalformedTaskError(f"{entry.name}/{TASK_FILE}: {text}")  # noqa: TRY301
                ids.add(candidate.task.task_id)
                if output is not None:
                    _keep(candidate, path / entry.name, output)
                status, reasons, adapted = _READ, [], candidate.adapted
            except (MalformedTaskError, UnwritableTaskError) as error:
                whole = error.reasons if isinstance(error, MalformedTaskError) else (str(error),)
                reasons, adapted = [one[:_REASON_CHARACTERS_MAX] for one in whole], []
                is_image = isinstance(error, MalformedTaskError) and error.image is not None
                status = _NEEDS_IMAGE if is_image else _REFUSED
            kinds.update({_kind(one) for one in reasons})
            rows.append(
                TaskRow(
                    name=entry.name,
                    format=source.format,
                    status=status,
                    reasons=reasons,
                    adapted=adapted,
                )
            )
    if not rows:
        raise MalformedTaskError(f"{path}: expected tasks, found none")
    return rows, kinds


def _kind(reason: str) -> str:
    """Return a reason without the parts specific to its task: the file, field and expectation."""
    place, _, rest = reason.partition(": ")
    field, _, text = rest.partition(": ")
    expected = text.rpartition("': ")[2].partition(", got ")[0] if text else ""
    return f"{Path(place).name}: {field}: {expected}"[:140].rstrip(": ")


def _keep(candidate: TaskCandidate, place: Path, output: Path) -> None:
    """Copy a folder of Harbor's as it is; write any other task as one."""
    if (place / TASK_FILE).is_file():
        shutil.copytree(place, output / folder_name(candidate.task.task_id), symlinks=True)
    else:
        write_harbor(candidate, candidate.task.split, output)


def import_tasks(arguments: argparse.Namespace, options: ReadOptions) -> int:
    """Print the survey's tables; write the report and the tasks with `-o`."""
    output: Path | None = arguments.output
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    rows, kinds = survey(arguments.folder, options, output)
    counts = Counter(row.status for row in rows)
    adapted = Counter(one for row in rows for one in row.adapted)
    report = {
        "num_tasks": len(rows),
        "statuses": {status: counts[status] for status in (_READ, _NEEDS_IMAGE, _REFUSED)},
        "reasons": dict(kinds.most_common()),
        "adapted": dict(adapted.most_common()),
    }
    if output is not None:
        whole = msgspec.json.encode(report | {"tasks": rows})
        write_atomic(output / REPORT_FILE, msgspec.json.format(whole, indent=1))
    if not arguments.json:
        for row in rows:
            for reason in row.reasons if row.status == _REFUSED else ():
                print_line(f"{row.name}: {reason}")
        _table("reasons", kinds.most_common(ROWS_MAX))
        _table("adapted", adapted.most_common(ROWS_MAX))
        _table("tasks", [*report["statuses"].items(), ("in all", len(rows))])  # type: ignore[union-attr]
    else:
        print_result(report, as_json=True)
    return 0 if counts[_READ] else 1


def _table(title: str, rows: Iterable[tuple[str, int]]) -> None:
    print_line(f"\n{title}")
    for name, number in rows:
        print_line(f"{number:8d}  {name}")
