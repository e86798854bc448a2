"""Draws a run's tasks from its sources: `[[prepare.sources]]`, or the one of `[prepare]`.

To add a kind: its name in `sources.SourceKind`, a function here, and its line in `_KINDS`.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from penstock.envs.ladder.generate import LadderSource
from penstock.envs.tasks.harbor.folder import MalformedTaskError
from penstock.envs.tasks.harbor.read import read_harbor_set
from penstock.envs.tasks.source import TaskCandidate
from penstock.envs.trail.config import TrailConfig
from penstock.envs.trail.tasks import draw_trails, to_candidate
from penstock.infra.quickstart.config import PrepareConfig
from penstock.infra.quickstart.sources import SourceConfig, SourceKind
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import load_reference
from penstock.messages.task import Split

OWN_TASKS_MAX = 1_000_000
"""What own code may make."""
Drawn = dict[Split, Iterable[TaskCandidate]]


def drawn_tasks(config: PrepareConfig, seed: int) -> Drawn:
    """Return the tasks of all sources by split, each with its source's name and limits.

    Raises:
        ConfigError: Two tasks have one id, or no source has tasks of a split; while it iterates.
        MalformedTaskError: A folder's task is malformed.

    """
    sets = [(source, _KINDS[source.kind](config, source, seed)) for source in config.all_sources]
    return {split: _all(split, sets) for split in Split}


def _all(split: Split, sets: list[tuple[SourceConfig, Drawn]]) -> Iterator[TaskCandidate]:
    owners: dict[str, str] = {}
    for source, drawn in sets:
        if split is Split.TRAIN and source.weight == 0:
            continue
        for one in drawn[split]:
            owner = owners.setdefault(one.task.task_id, source.name)
            if owner != source.name:
                text = f"expected each task once, got {one.task.task_id!r} of {owner!r}, too"
                raise ConfigError(f"prepare.sources.{source.name}: {text}")
            limits = source.limits or one.task.limits
            yield replace(one, task=replace(one.task, source=source.name, limits=limits))
    if not owners:
        names = ", ".join(source.name for source, _ in sets)
        raise ConfigError(f"prepare.sources: expected {split} tasks, none of {names} has any")


def _ladder(config: PrepareConfig, source: SourceConfig, seed: int) -> Drawn:
    # A run's only source has no name in its seed and its ids: they stay as they always were.
    prefix = f"{source.name}-" if config.sources else ""
    return {
        split: (
            replace(one, task=replace(one.task, limits=config.limits))
            for one in LadderSource(
                split,
                num,
                source.selection or config.selection,
                random.Random(f"{prefix}{split}/{seed}"),
                f"{prefix}{split}",
            ).candidates()
        )
        for split, num in _nums(config, source).items()
    }


def _trail(config: PrepareConfig, source: SourceConfig, seed: int) -> Drawn:
    prefix = f"{source.name}-" if config.sources else ""
    size = source.trail or config.trail or TrailConfig()
    return {
        split: map(
            to_candidate,
            draw_trails(
                split,
                num,
                size,
                config.limits,
                random.Random(f"{prefix}trails/{split}/{seed}"),
                f"{prefix}{split}",
            ),
        )
        for split, num in _nums(config, source).items()
    }


def _nums(config: PrepareConfig, source: SourceConfig) -> dict[Split, int]:
    return {
        Split.TRAIN: source.num_train_tasks or config.num_train_tasks,
        Split.HELDOUT: source.num_heldout_tasks or config.num_heldout_tasks,
    }


def _folder(config: PrepareConfig, source: SourceConfig, seed: int) -> Drawn:
    """Return a folder's tasks, held-out ones only if no reward can be forged."""
    candidates = read_harbor_set(
        Path(source.path),
        egress_addresses=config.egress_addresses,
        isolation_min=config.isolation_min,
    )
    chosen = {split: [one for one in candidates if one.task.split is split] for split in Split}
    if not config.evaluates_unseparated:
        heldout = chosen[Split.HELDOUT]
        chosen[Split.HELDOUT] = [one for one in heldout if not one.hidden.unseparated]
    if not config.sources:
        _check_both(source.path, chosen)
    if source.origins:
        known = sorted({one.origin.source for one in candidates})
        if unknown := sorted(set(source.origins) - set(known)):
            text = f"expected some of {', '.join(known)}, got {', '.join(unknown)}"
            raise ConfigError(f"prepare.sources.{source.name}.origins: {text}")
    caps = {Split.TRAIN: source.num_train_tasks, Split.HELDOUT: source.num_heldout_tasks}
    return {
        split: _some(
            [one for one in tasks if not source.origins or one.origin.source in source.origins],
            caps[split],
            random.Random(f"{source.name}-{split}/{seed}"),
        )
        for split, tasks in chosen.items()
    }


def _own(config: PrepareConfig, source: SourceConfig, seed: int) -> Drawn:
    """Return the tasks that own code makes, at most as many of each split as asked for."""
    where = f"prepare.sources.{source.name}.make"
    make = cast("Callable[[int], Iterable[object]]", load_reference(source.make, where))
    chosen: dict[Split, list[TaskCandidate]] = {split: [] for split in Split}
    caps = {Split.TRAIN: source.num_train_tasks, Split.HELDOUT: source.num_heldout_tasks}
    for one in islice(make(seed), OWN_TASKS_MAX):
        if not isinstance(one, TaskCandidate):
            text = f"expected TaskCandidate, got {type(one).__name__}"
            raise ConfigError(f"{where}: {source.make!r}: {text}")
        chosen[one.task.split].append(one)
    return {split: tasks[: caps[split]] for split, tasks in chosen.items()}


def _some(
    tasks: list[TaskCandidate], num_max: int | None, draw: random.Random
) -> list[TaskCandidate]:
    if num_max is None or num_max >= len(tasks):
        return tasks
    return [tasks[index] for index in sorted(draw.sample(range(len(tasks)), num_max))]


def _check_both(path: str, chosen: dict[Split, list[TaskCandidate]]) -> None:
    """Refuse a run's only folder where it has no tasks of a split, and say what makes one."""
    for split, tasks in chosen.items():
        if not tasks:
            words = f'[metadata.penstock] split = "{split}" makes one of a task'
            if split is Split.HELDOUT:
                words += "; its verifier must be separated, or prepare.evaluates_unseparated true"
            raise MalformedTaskError(f"{path}: expected tasks of both splits; {words}")


_KINDS: dict[SourceKind, Callable[[PrepareConfig, SourceConfig, int], Drawn]] = {
    SourceKind.LADDER: _ladder,
    SourceKind.TRAIL: _trail,
    SourceKind.FOLDER: _folder,
    SourceKind.OWN: _own,
}
