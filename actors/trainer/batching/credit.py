"""Advantages of live samples: reward minus baseline first, and later the change. Pure.

A trained sample may be revised: its turns stay, its reward changes. Its turns are then trained once
more with the change of their advantages, against the baseline of the first time:

    revision 0: reward 1.0, baseline 0.6     ->  advantage 0.4, trained
    revision 1: reward 0.2                   ->  advantage 0.2 - 1.0 = -0.8
    revision 2: all feedback retracted       ->  advantage 0.6 - 0.2 = 0.4: the sum is 0

A fold of manifests alone, so a replay computes the same.
"""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from penstock.actors.trainer.batching.fair_draw import RecentUsers, capped
from penstock.actors.trainer.batching.groups import merge_spans
from penstock.actors.trainer.config import LiveConfig
from penstock.actors.trainer.objective.live_baseline import LiveBaseline
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reward import Outcome
from penstock.messages.training import SampleEntry

NUM_SETTLED_MAX = 200_000
"""Settled samples remembered for later revisions: more than the join remembers requests."""


class _SettledSample(msgspec.Struct, frozen=True, kw_only=True):
    """State of a sample on the log."""

    revision: int
    trained: SampleEntry | None = None
    """Newest entry that was trained."""
    baseline: float = 0.0
    """Baseline of the first trained entry."""
    share: float = 1.0
    """Fraction of the advantage left by the caps."""


def entry_of(event: LiveSampleJoined) -> SampleEntry:
    """Return a sample's entry before any credit."""
    return SampleEntry(
        rollout_id=event.sample_id,
        revision=event.revision,
        outcome=Outcome.SOLVED if event.reward > 0 else Outcome.FAILED,
        reward=event.reward,
        num_turns=len(event.turns),
        turn_rewards=event.turn_rewards,
        unrated=event.unrated,
        weight=event.weight,
        advantage=0.0,
        tenant=event.tenant,
        user=event.user,
        version_spans=merge_spans(span for turn in event.turns for span in turn.version_spans),
    )


class LiveCredit:
    """Advantages of live samples, folded from the manifests so far."""

    def __init__(self) -> None:
        """Start before the first manifest."""
        self._baseline = LiveBaseline()
        self.recent = RecentUsers()
        self._settled: OrderedDict[str, _SettledSample] = OrderedDict()

    def is_settled(self, sample_id: str, revision: int) -> bool:
        """Return whether a manifest has this revision or a later one."""
        settled = self._settled.get(sample_id)
        return settled is not None and settled.revision >= revision

    def was_trained(self, sample_id: str) -> bool:
        """Return whether a revision of the sample was trained."""
        settled = self._settled.get(sample_id)
        return settled is not None and settled.trained is not None

    def changes_nothing(self, entry: SampleEntry) -> bool:
        """Return whether a revision of a trained sample leaves all of its advantages unchanged."""
        settled = self._settled.get(entry.rollout_id)
        return (
            settled is not None
            and settled.trained is not None
            and not any(_changes(entry, settled))
        )

    def credit(self, entries: Sequence[SampleEntry], config: LiveConfig) -> list[SampleEntry]:
        """Return a batch's samples with their advantages, in the same order."""
        firsts = [entry for entry in entries if not self.was_trained(entry.rollout_id)]
        based = iter(self._baseline.credit(firsts, config))
        found = [
            _change(entry, self._settled[entry.rollout_id])
            if self.was_trained(entry.rollout_id)
            else _spread(next(based))
            for entry in entries
        ]
        return capped(found, self.recent.shares(found, config))

    def commit(self, entries: Sequence[SampleEntry], config: LiveConfig) -> None:
        """Apply the live samples of a stored manifest."""
        trained = [entry for entry in entries if entry.outcome.is_trained]
        # Changes are measured against the first baseline, so they must not move it.
        self._baseline.add([entry for entry in trained if not entry.is_change], config)
        self.recent.add(trained)
        for entry in entries:
            before = self._settled.pop(entry.rollout_id, _SettledSample(revision=-1))
            after = msgspec.structs.replace(before, revision=max(before.revision, entry.revision))
            if entry.outcome.is_trained:
                after = msgspec.structs.replace(after, trained=entry)
                if not entry.is_change:
                    after = msgspec.structs.replace(
                        after, baseline=_baseline_of(entry), share=entry.share
                    )
            self._settled[entry.rollout_id] = after
        while len(self._settled) > NUM_SETTLED_MAX:
            self._settled.popitem(last=False)


def turn_rewards_of(entry: SampleEntry) -> list[float | None]:
    """Return the reward of each turn, None for an unrated turn."""
    added = entry.turn_rewards or [0.0] * entry.num_turns
    unrated = set(entry.unrated)
    return [None if i in unrated else entry.reward + more for i, more in enumerate(added)]


def _spread(entry: SampleEntry) -> SampleEntry:
    """Give each turn of a sample its own advantage, where they differ."""
    if not entry.turn_rewards and not entry.unrated:
        return entry
    baseline = entry.reward - entry.advantage
    values = [0.0 if r is None else r - baseline for r in turn_rewards_of(entry)]
    return _with(entry, values)


def _change(entry: SampleEntry, settled: _SettledSample) -> SampleEntry:
    return msgspec.structs.replace(_with(entry, _changes(entry, settled)), is_change=True)


def _changes(entry: SampleEntry, settled: _SettledSample) -> list[float]:
    """Return the change of each turn's advantage, scaled as the caps scaled the first one."""
    assert settled.trained is not None
    before = turn_rewards_of(settled.trained)
    now = turn_rewards_of(entry)
    return [
        settled.share * (_above(new, settled.baseline) - _above(old, settled.baseline))
        for old, new in zip(before, now, strict=True)
    ]


def _above(reward: float | None, baseline: float) -> float:
    return 0.0 if reward is None else reward - baseline


def _with(entry: SampleEntry, values: Sequence[float]) -> SampleEntry:
    """Return a sample with the given advantage per turn."""
    if len(set(values)) <= 1:
        return msgspec.structs.replace(entry, advantage=values[0])
    return msgspec.structs.replace(
        entry, advantage=sum(values) / len(values), turn_advantages=list(values)
    )


def _baseline_of(entry: SampleEntry) -> float:
    """Return the baseline that a first entry was credited against."""
    for index, reward in enumerate(turn_rewards_of(entry)):
        if reward is not None:
            value = entry.turn_advantages[index] if entry.turn_advantages else entry.advantage
            return reward - value / entry.share if entry.share else reward
    return entry.reward
