"""`penstock tasks make|check|stats`: coding tasks from local repositories."""

import argparse
import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.runtime.files import write_atomic
from penstock.envs.backends import open_backend
from penstock.envs.factory.commits import CommitSource
from penstock.envs.factory.factory import Bounds, Factory, Yield, open_source, statistics
from penstock.envs.factory.injected import InjectConfig
from penstock.envs.factory.lab import MachineLab
from penstock.envs.factory.splits import SplitBy, check_no_leak, split_tasks
from penstock.envs.ladder.generate import Selection
from penstock.envs.ladder.source import LadderSource
from penstock.envs.microvm.images.images import images_of
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.tasks.gates import check_candidate
from penstock.envs.tasks.harbor import write_harbor
from penstock.envs.tasks.harbor_read import read_harbor_set
from penstock.envs.tasks.source import TaskCandidate, TaskRejectedError, TaskSource
from penstock.infra.tasks.page import tasks_page
from penstock.messages.errors import PenstockError
from penstock.messages.task import Split

YIELD_FILE, PAGE_FILE = "yield.json", "index.html"
LADDER = "ladder"


class TasksFolderError(PenstockError, FileExistsError):
    """The folder for the tasks is not empty."""


def run(arguments: argparse.Namespace) -> int:
    """Run one action of `penstock tasks`."""
    if arguments.action == "make":
        return asyncio.run(_make(arguments))
    if arguments.action == "check":
        return asyncio.run(_check(arguments))
    return _stats(arguments)


def write_set(
    root: Path, candidates: list[TaskCandidate], splits: dict[str, Split], counts: Yield
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
    _print(statistics(candidates, splits, factory.counts), as_json=arguments.json)
    return 0 if candidates else 1


def _empty_folder(root: Path) -> Path:
    if root.exists() and any(root.iterdir()):
        raise TasksFolderError(f"{root}: expected a new or empty folder")
    return root


def _source(name: str, arguments: argparse.Namespace) -> TaskSource:
    if name == LADDER:
        rng = random.Random(f"{Split.TRAIN}/{arguments.seed}")
        return LadderSource(Split.TRAIN, arguments.num, Selection(), rng, Split.TRAIN.value)
    if arguments.commits:
        return CommitSource(Path(name))
    return open_source(name, InjectConfig(seed=arguments.seed))


async def _check(arguments: argparse.Namespace) -> int:
    candidates = _read(arguments)
    splits = {one.task.task_id: one.task.split for one in candidates}
    check_no_leak(candidates, splits, SplitBy.FUNCTION)
    problems: dict[str, str] = {}
    backend = open_backend("uml")
    async with Pool(backend, size=1, live_max=3, images=images_of(backend)) as pool:
        lab = MachineLab(pool)
        for candidate in candidates:
            try:
                await check_candidate(candidate, lab, repeats=1)
            except TaskRejectedError as error:
                problems[candidate.task.task_id] = f"{error.reason}: {error.detail}"
    _print({"num_tasks": len(candidates), "rejected": problems}, as_json=arguments.json)
    return 1 if problems else 0


def _read(arguments: argparse.Namespace) -> list[TaskCandidate]:
    return read_harbor_set(arguments.folder, egress_addresses=arguments.egress_addresses)


def _stats(arguments: argparse.Namespace) -> int:
    candidates = _read(arguments)
    splits = {one.task.task_id: one.task.split for one in candidates}
    path: Path = arguments.folder / YIELD_FILE
    counts = msgspec.json.decode(path.read_bytes(), type=Yield) if path.is_file() else Yield()
    write_atomic(arguments.folder / PAGE_FILE, tasks_page(candidates, splits, counts).encode())
    _print(statistics(candidates, splits, counts), as_json=arguments.json)
    return 0


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    encoded = msgspec.json.encode(result)
    text = encoded if as_json else msgspec.json.format(encoded, indent=2)
    sys.stdout.write(text.decode() + "\n")


def _say(text: str) -> None:
    sys.stderr.write(f"tasks: {text}\n")
