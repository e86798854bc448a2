"""Draws a run's tasks from its sources: `[[prepare.sources]]`, or the folder `prepare.tasks`.

To add a kind: its name in `settings.SourceKind`, a function here, and its line in `_KINDS`.
"""

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from penstock.envs.tasks.harbor.folder import MalformedTaskError
from penstock.envs.tasks.harbor.read import read_harbor_set
from penstock.envs.tasks.source import TaskCandidate, TaskOrigin
from penstock.infra.config.prepare import PrepareConfig, SourceConfig, SourceKind
from penstock.infra.corpora.lines import existing
from penstock.infra.corpora.rows import read_rows
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import load_reference, read_settings
from penstock.messages.task import HiddenTests, Limits, Split, Task

OWN_TASKS_MAX = 1_000_000
"""Bound on the tasks that own code makes."""
Drawn = dict[Split, Iterable[TaskCandidate]]
T = TypeVar("T")


@dataclass(frozen=True)
class TaskRequest:
    """The tasks of one split that a run asks own code for."""

    source: str
    """Name of the source: what distinguishes its tasks' ids from those of other sources."""
    split: Split
    num_tasks: int
    """How many are taken; one that makes fewer makes a smaller run."""
    limits: Limits
    """`prepare.limits`, for the tasks' own; `limits` of the source replace them in any case."""
    given: Mapping[str, Any]
    """The table `settings` of the source, unchecked."""
    field: str
    """Where that table stands, for errors, e.g. `prepare.sources.NAME.settings`."""

    def settings(self, kind: type[T]) -> T:
        """Return the source's settings as a struct.

        Raises:
            ConfigError: They are not of that kind; the text names the key.

        """
        return read_settings(self.given, kind, self.field)


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
        names = ", ".join(source.name for source, _ in sets) or "no source"
        raise ConfigError(f"prepare.sources: expected {split} tasks, none of {names} has any")


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
    if config.tasks:
        _check_both(source.path, chosen)
    if source.origins:
        known = sorted({one.origin.source for one in candidates})
        if unknown := sorted(set(source.origins) - set(known)):
            text = f"expected some of {', '.join(known)}, got {', '.join(unknown)}"
            raise ConfigError(f"prepare.sources.{source.name}.origins: {text}")
    caps = _caps(source)
    return {
        split: _some(
            [one for one in tasks if not source.origins or one.origin.source in source.origins],
            caps[split],
            random.Random(f"{source.name}-{split}/{seed}"),
        )
        for split, tasks in chosen.items()
    }


def _own(config: PrepareConfig, source: SourceConfig, seed: int) -> Drawn:
    """Return the tasks that own code makes, at most as many of each split as asked for.

    A function of the seed alone makes the tasks of both splits at once; one that also takes a
    `TaskRequest` is called for each split, and draws while it is iterated.
    """
    where = f"prepare.sources.{source.name}"
    load = load_reference(source.make, f"{where}.make")
    make = cast("Callable[..., Iterable[object]]", load)
    if not _takes_request(make):
        made = [*_candidates(make(seed), source)]
        caps = _caps(source)
        of = {split: [one for one in made if one.task.split is split] for split in Split}
        return {split: tasks[: caps[split]] for split, tasks in of.items()}
    nums = {
        Split.TRAIN: source.num_train_tasks or config.num_train_tasks,
        Split.HELDOUT: source.num_heldout_tasks or config.num_heldout_tasks,
    }
    requests = [
        TaskRequest(source.name, split, num, config.limits, source.settings, f"{where}.settings")
        for split, num in nums.items()
    ]
    return {
        one.split: _candidates(islice(make(seed, one), one.num_tasks), source, one.split)
        for one in requests
    }


class PromptRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of prompts, for tasks that a program outside of the run plays."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
    prompt: str
    split: Split = Split.TRAIN
    category: str = "prompt"


def _prompts(config: PrepareConfig, source: SourceConfig, seed: int) -> Drawn:
    """Return tasks of a prompt alone; whoever plays them reports the reward."""
    field = f"prepare.sources.{source.name}.path"
    found: dict[str, TaskCandidate] = {}
    for place, row in read_rows(existing(source.path, field), PromptRow, field):
        if row.id in found:
            raise ConfigError(f"{field}: {place}: expected each id once, got {row.id!r} twice")
        task = Task(
            task_id=row.id,
            category=row.category,
            split=row.split,
            instruction=row.prompt,
            files={},
            limits=config.limits,
        )
        hidden = HiddenTests(task_id=row.id, files={}, argv=[])
        origin = TaskOrigin(source=source.name, repository=row.id, kind="prompt")
        found[row.id] = TaskCandidate(task=task, hidden=hidden, origin=origin)
    caps = _caps(source)
    return {
        split: _some(
            [one for one in found.values() if one.task.split is split],
            caps[split],
            random.Random(f"{source.name}-{split}/{seed}"),
        )
        for split in Split
    }


def _takes_request(make: Callable[..., object]) -> bool:
    try:
        return len(inspect.signature(make).parameters) > 1
    except ValueError:  # A built-in without a signature.
        return False


def _candidates(
    made: Iterable[object], source: SourceConfig, split: Split | None = None
) -> Iterator[TaskCandidate]:
    where = f"prepare.sources.{source.name}.make: {source.make!r}"
    for one in islice(made, OWN_TASKS_MAX):
        if not isinstance(one, TaskCandidate):
            raise ConfigError(f"{where}: expected TaskCandidate, got {type(one).__name__}")
        if split is not None and one.task.split is not split:
            text = f"expected a task of the split {split}, got {one.task.task_id!r} of"
            raise ConfigError(f"{where}: {text} {one.task.split}")
        yield one


def _caps(source: SourceConfig) -> dict[Split, int | None]:
    return {Split.TRAIN: source.num_train_tasks, Split.HELDOUT: source.num_heldout_tasks}


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
    SourceKind.FOLDER: _folder,
    SourceKind.PROMPTS: _prompts,
    SourceKind.OWN: _own,
}
