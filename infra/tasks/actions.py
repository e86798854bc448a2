"""`penstock tasks make|check|import|images|get|stats`: coding tasks, made here or by others."""

import argparse
import asyncio
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.runtime.files import write_atomic
from penstock.envs.backends import open_backend
from penstock.envs.factory.bug_injection import InjectConfig
from penstock.envs.factory.commit_tasks import CommitSource
from penstock.envs.factory.factory import Bounds, Factory, MakingCounts, open_source, statistics
from penstock.envs.factory.lab import MachineLab
from penstock.envs.factory.plans import TaskPlan, TaskSource
from penstock.envs.factory.splits import SplitBy, check_no_leak, split_tasks
from penstock.envs.microvm.images.layers import make_images
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.needs import SizedBackend
from penstock.envs.tasks.gates import check_candidate
from penstock.envs.tasks.harbor.read import ReadOptions
from penstock.envs.tasks.harbor.schema import INTERNET
from penstock.envs.tasks.harbor.write import write_harbor
from penstock.envs.tasks.readers.opening import read_tasks
from penstock.envs.tasks.source import (
    TaskCandidate,
    TaskRejectedError,
    difficulty,
    difficulty_label,
    difficulty_terms,
)
from penstock.infra.config.prepare import PrepareConfig, SourceConfig, SourceKind
from penstock.infra.output import print_result, write_to
from penstock.infra.run.task_sources import drawn_tasks
from penstock.infra.tasks.get import get_tasks
from penstock.infra.tasks.images import make_task_images
from penstock.infra.tasks.survey import import_tasks
from penstock.messages.errors import PenstockError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.reading.references import is_reference
from penstock.messages.task import Split

YIELD_FILE, PAGE_FILE = "yield.json", "index.html"


class TasksFolderError(PenstockError, FileExistsError):
    """The folder for the tasks is not empty."""


def run(arguments: argparse.Namespace) -> int:
    """Run one action of `penstock tasks`."""
    if arguments.action == "make":
        return asyncio.run(_make(arguments))
    if arguments.action == "check":
        return asyncio.run(_check(arguments))
    if arguments.action == "import":
        return import_tasks(arguments, _options(arguments))
    if arguments.action == "images":
        return make_task_images(arguments, _options(arguments))
    if arguments.action == "get":
        return get_tasks(arguments)
    return _stats(arguments)


def write_set(
    root: Path, candidates: list[TaskCandidate], splits: dict[str, Split], counts: MakingCounts
) -> None:
    """Write Harbor folders, the yield and the page."""
    for candidate in candidates:
        write_harbor(candidate, splits[candidate.task.task_id], root)
    write_atomic(root / YIELD_FILE, msgspec.json.format(msgspec.json.encode(counts), indent=2))
    write_atomic(root / PAGE_FILE, tasks_page(candidates, splits, counts).encode())


async def _make(arguments: argparse.Namespace) -> int:
    root = _empty_folder(arguments.output)
    sources = [_source(name, arguments) for name in arguments.sources]
    num: int = arguments.concurrent
    async with Pool(open_backend("uml"), size=num, live_max=2 * num) as pool:
        bounds = Bounds(
            num_tasks_max=arguments.num, num_concurrent=num, wall_s_max=arguments.wall_s
        )
        factory = Factory(MachineLab(pool), bounds, _say)
        candidates = await factory.make(sources)
    by = SplitBy(arguments.split_by)
    splits = split_tasks(candidates, by, arguments.heldout)
    write_set(root, candidates, splits, factory.counts)
    print_result(statistics(candidates, splits, factory.counts), as_json=arguments.json)
    return 0 if candidates else 1


def _empty_folder(root: Path) -> Path:
    if root.exists() and any(root.iterdir()):
        raise TasksFolderError(f"{root}: expected a new or empty folder")
    return root


def _source(name: str, arguments: argparse.Namespace) -> TaskSource:
    if is_reference(name):
        return OwnSource(name, arguments.num, arguments.seed)
    if arguments.commits:
        return CommitSource(Path(name))
    return open_source(name, InjectConfig(seed=arguments.seed))


class OwnSource:
    """Training tasks that own code makes, `module:name`, for the gates in machines.

    Raises:
        ConfigError: The own code is not there; from `plans`, it makes no tasks.

    """

    def __init__(self, make: str, num: int, seed: int) -> None:
        self.name = make.rpartition(":")[2][:32]
        source = SourceConfig(name=self.name, kind=SourceKind.OWN, make=make, num_train_tasks=num)
        config = PrepareConfig(sources=(source,))
        self._candidates = drawn_tasks(config, seed)[Split.TRAIN]

    def plans(self) -> Iterator[TaskPlan]:
        """MakingCounts one plan per task."""
        yield from map(CandidatePlan, self._candidates)


class CandidatePlan:
    """A task that is there already."""

    def __init__(self, candidate: TaskCandidate) -> None:
        self.name = candidate.task.task_id
        self._candidate = candidate

    async def draft(self, lab: MachineLab) -> list[TaskCandidate]:
        """Return it."""
        return [self._candidate]


async def _check(arguments: argparse.Namespace) -> int:
    candidates = _read(arguments)
    splits = {one.task.task_id: one.task.split for one in candidates}
    check_no_leak(candidates, splits, SplitBy.FUNCTION)
    problems: dict[str, str] = {}
    backend = open_backend("uml")
    memory_mib: int = arguments.memory_mib
    own_mib = backend.needs.memory_mib if isinstance(backend, SizedBackend) else memory_mib
    live_max = max(3, memory_mib // own_mib)
    size = 1 if all(one.task.machine.memory_mib == 0 for one in candidates) else 0
    async with Pool(backend, size=size, live_max=live_max, images=make_images(backend)) as pool:
        lab = MachineLab(pool)
        for candidate in candidates:
            try:
                await check_candidate(candidate, lab.grade, repeats=1, solve=lab.solve)
            except TaskRejectedError as error:
                problems[candidate.task.task_id] = f"{error.reason}: {error.detail}"
    print_result({"num_tasks": len(candidates), "rejected": problems}, as_json=arguments.json)
    return 1 if problems else 0


def _read(arguments: argparse.Namespace) -> list[TaskCandidate]:
    return read_tasks(arguments.folder, _options(arguments))


def _options(arguments: argparse.Namespace) -> ReadOptions:
    return ReadOptions(
        egress_addresses=arguments.egress_addresses,
        internet=INTERNET if arguments.internet is None else tuple(arguments.internet),
        is_offline=arguments.offline,
    )


def _stats(arguments: argparse.Namespace) -> int:
    candidates = _read(arguments)
    splits = {one.task.task_id: one.task.split for one in candidates}
    path: Path = arguments.folder / YIELD_FILE
    counts = (
        parse_json(path.read_bytes(), MakingCounts, str(path)) if path.is_file() else MakingCounts()
    )
    write_atomic(arguments.folder / PAGE_FILE, tasks_page(candidates, splits, counts).encode())
    print_result(statistics(candidates, splits, counts), as_json=arguments.json)
    return 0


def _say(text: str) -> None:
    write_to(sys.stderr, f"tasks: {text}\n")


DIFF_LINES_MAX = 400
TESTS_SHOWN_MAX = 20
_PAGE = Path(__file__).with_name("page.html")
_DATA_MARK = "/*DATA*/null"


def tasks_page(
    candidates: Sequence[TaskCandidate], splits: dict[str, Split], counts: MakingCounts
) -> str:
    """Return the page: statistics, filters, a table, and one task's details on a click."""
    data = {
        "statistics": statistics(candidates, splits, counts),
        "tasks": [_row(one, splits[one.task.task_id]) for one in candidates],
    }
    # In a script element only `<` could end it: escaped, no task's text is ever markup.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _PAGE.read_text().replace(_DATA_MARK, encoded)


def _row(candidate: TaskCandidate, split: Split) -> dict[str, Any]:
    origin = candidate.origin
    return {
        "id": candidate.task.task_id,
        "split": split.value,
        "source": origin.source,
        "repository": origin.repository,
        "kind": origin.kind,
        "change": origin.change,
        "hint": origin.hint,
        "lines": origin.num_lines,
        "files": sorted(candidate.task.contents),
        "failing": f"{origin.num_cases_failed or '?'}/{origin.num_cases}",
        "difficulty": round(difficulty(origin), 2),
        "label": difficulty_label(origin),
        "terms": {name: round(value, 2) for name, value in difficulty_terms(origin).items()},
        "instruction": candidate.task.instruction,
        "diff": _diff(candidate),
        "expected": candidate.hidden.expected[:TESTS_SHOWN_MAX],
    }


def _diff(candidate: TaskCandidate) -> str:
    lines: list[str] = []
    for path, text in sorted(candidate.hidden.gold_files.items()):
        before = candidate.task.files.get(path, "").splitlines()
        lines += difflib.unified_diff(before, text.splitlines(), path, path, lineterm="")
    return "\n".join(lines[:DIFF_LINES_MAX])
