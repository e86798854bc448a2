"""A fold that starts from a snapshot and reads what follows is the fold of the whole log."""

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.lab.age.aged_log import TRAINER, AgedLog, JoinContext, finished

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.gatekeeper.fold import GateFold
from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.fold import RunFold
from penstock.actors.pacer.config import PacerConfig
from penstock.actors.pacer.curriculum import Curriculum
from penstock.actors.pacer.staleness_budget import Budget
from penstock.actors.runtime.event_dispatcher import handler_name
from penstock.actors.runtime.snapshots.state_tree import attributes_of, is_settings
from penstock.actors.runtime.snapshots.stored import (
    SNAPSHOT_FORMAT,
    SnapshotHead,
    pack_state,
    unpack_state,
)
from penstock.actors.trainer.batching.batcher import Batcher
from penstock.messages.base import Event
from penstock.messages.errors import CodecError, FormatError
from penstock.messages.feedback import FeedbackRetracted, LiveSampleJoined
from penstock.messages.reading.ledger import Ledger
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.task import GroupGranted, Split, Task
from penstock.messages.training import BatchManifest, StepCompleted

NUM_REQUESTS = 3000
Log = Sequence[tuple[Event, float]]


class Join:
    saved = ("actor",)

    def __init__(self) -> None:
        self.actor = FeedbackJoiner(JoinConfig(num_open_max=500))
        self.ctx: Any = JoinContext()

    def apply(self, event: Event, at: float) -> object:
        if type(event) not in self.actor.follows:
            return None
        self.ctx.stored_at = at
        handler = getattr(self.actor, handler_name(type(event)))
        return [
            *finished(handler(event, self.ctx)),
            *finished(self.actor.on_tick(self.ctx)),
        ]


class Monitor:
    saved = ("fold", "index")

    def __init__(self) -> None:
        self.fold, self.index = RunFold(), EpisodeIndex()

    def apply(self, event: Event, at: float) -> object:
        self.fold.apply(event, at)
        if handler := self.index.handlers.get(type(event)):
            handler(event, at)
        return self.fold.state(at).live


class Gates:
    saved = ("fold",)

    def __init__(self) -> None:
        self.fold = GateFold(GatekeeperConfig(), "judge")

    def apply(self, event: Event, at: float) -> object:
        if type(event) not in self.fold.types:
            return None
        self.fold.apply(event)
        return self.fold.view(0) if isinstance(event, StepCompleted) else None


class Grants:
    saved = ("curriculum", "budget")

    def __init__(self) -> None:
        tasks = [
            Task(
                task_id=f"task{n}",
                split=Split.TRAIN,
                category=f"c{n % 3}",
                instruction="",
                files={},
            )
            for n in range(50)
        ]
        self.curriculum = Curriculum(tasks, PacerConfig(), {})
        self.budget = Budget(groups_per_batch=4, staleness_max=1, steps_max=100)

    def apply(self, event: Event, at: float) -> object:
        if isinstance(event, GroupGranted):
            self.curriculum.note(event)
        if isinstance(event, BatchManifest):
            self.budget = self.budget.with_batch(event.policy_version, 1, 0)
        return self.curriculum.pick(self.curriculum.num_noted)


class Tables:
    """The trainer's."""

    saved = ("batcher", "ledger")

    def __init__(self) -> None:
        self.batcher, self.ledger = Batcher(TRAINER), Ledger()

    def apply(self, event: Event, at: float) -> object:
        if isinstance(event, LiveSampleJoined):
            self.batcher.add_live(event)
            self.ledger.add_live(event)
        if isinstance(event, PreferencePair | Label):
            self.batcher.preferences.add(event)
            self.ledger.preferences.add(event)
        if isinstance(event, FeedbackRetracted):
            self.batcher.retract(event)
        if isinstance(event, BatchManifest):
            self.batcher.commit(event)
            self.ledger.add_manifest(event)
            return self.ledger.totals(), self.ledger.violations
        return None


FOLDS: tuple[Callable[[], Any], ...] = (Join, Monitor, Gates, Grants, Tables)


@pytest.fixture(scope="module")
def log() -> Log:
    return list(AgedLog(NUM_REQUESTS, per_minute=20.0, join=JoinConfig(num_open_max=500)))


def state_of(value: Any) -> Any:
    """Return everything that a value consists of, so that nothing forgotten compares equal."""
    if is_settings(value) or callable(value):
        return None
    if isinstance(value, dict):
        return [type(value), [(state_of(k), state_of(v)) for k, v in value.items()]]
    if isinstance(value, set | frozenset):
        return [type(value), sorted(map(repr, value))]
    if isinstance(value, np.ndarray | array):
        return list(value)
    if not isinstance(value, str | bytes) and hasattr(value, "__iter__"):
        is_count = type(value).__name__ == "count"
        return repr(value) if is_count else [type(value), list(map(state_of, value))]
    if isinstance(value, msgspec.Struct):
        return [type(value), [state_of(getattr(value, n)) for n in value.__struct_fields__]]
    if hasattr(value, "__dict__") and type(value).__module__.startswith("penstock"):
        return [type(value), {n: state_of(getattr(value, n)) for n in attributes_of(value)}]
    return value


def roots_of(fold: Any) -> dict[str, Any]:
    return {name: getattr(fold, name) for name in attributes_of(fold)}


def packed(fold: Any) -> bytes:
    head = SnapshotHead(format=SNAPSHOT_FORMAT, fold="f", version=1, positions={}, num_events=0)
    return pack_state(roots_of(fold), head)


def restored(make: Callable[[], Any], data: bytes) -> Any:
    fold = make()
    _, found = unpack_state(data, roots_of(fold), fold="f", version=1, what="snapshot")
    for name, value in found.items():
        setattr(fold, name, value)
    return fold


@pytest.mark.parametrize("make", FOLDS)
def test_a_fold_from_any_snapshot_equals_the_fold_of_the_whole_log(make, log: Log):
    whole = make()
    rng = random.Random(make.__name__)
    cuts = sorted(rng.sample(range(len(log)), 6))
    snapshots: list[tuple[int, bytes]] = []
    for index, (event, at) in enumerate(log):
        if index in cuts:
            snapshots.append((index, packed(whole)))
        whole.apply(event, at)
    for index, data in snapshots:
        fold = restored(make, data)
        for event, at in log[index:]:
            fold.apply(event, at)
        assert state_of(roots_of(fold)) == state_of(roots_of(whole))


@pytest.mark.parametrize("make", FOLDS)
def test_from_a_snapshot_on_a_fold_concludes_the_same(make, log: Log):
    whole, cut = make(), len(log) // 2
    for event, at in log[:cut]:
        whole.apply(event, at)
    fold = restored(make, packed(whole))
    for event, at in log[cut:]:
        assert fold.apply(event, at) == whole.apply(event, at)


def test_a_snapshot_of_other_settings_or_another_state_leaves_the_fold_as_it_was(log: Log):
    join = Join()
    for event, at in log[:500]:
        join.apply(event, at)
    other = Join()
    other.actor = FeedbackJoiner(JoinConfig(num_open_max=501))
    before = state_of(roots_of(other))
    with pytest.raises(FormatError, match="other settings"):
        unpack_state(packed(join), roots_of(other), fold="f", version=1, what="snapshot")
    data = packed(join)
    renamed = data.replace(
        b"penstock.actors.feedback.sessions:", b"penstock.actors.feedback.sessionz:"
    )
    same = Join()
    with pytest.raises(CodecError):
        unpack_state(renamed, roots_of(same), fold="f", version=1, what="snapshot")
    assert state_of(roots_of(same)) == state_of(roots_of(Join()))
    assert state_of(roots_of(other)) == before
