"""What became of each piece of feedback: a fold of the log, the same in every gateway. Pure.

```
 waiting ─LiveSampleJoined─▶ joined ─BatchManifest─▶ training ─StepCompleted─▶ trained
    │  └─ Label, PreferencePair ──────────┘ (as a judgment or correction, beside its sample)
    │                          │                └─▶ stale, capped ...: its outcome
    │                          └─ a later revision does without it ─▶ superseded
    ├─ FeedbackQuarantined ─▶ quarantined ─ QuarantineReleased ─▶ waiting
    ├─ FeedbackLeftOut ─▶ refused, capped
    └─ FeedbackRetracted ─▶ retracted
```
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from penstock.messages.feedback import (
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    LeftOutReason,
    LiveSampleJoined,
    feedback_key,
)
from penstock.messages.reward import Outcome
from penstock.messages.signals.preferences import PreferenceFate
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased
from penstock.messages.training import BatchManifest, StepCompleted

NUM_TIMES_MAX = 8
"""Times that are known of a piece of feedback with its amendments."""
NUM_KNOWN_MAX = 100_000
"""Pieces of feedback, and samples, whose fate is known; the oldest is forgotten."""


@dataclass(kw_only=True)
class _Sample:
    counting: set[str] = field(default_factory=set[str])
    """Feedback that its newest revision counts."""
    listed: dict[str, int] = field(default_factory=dict[str, int])
    """Feedback -> the first revision that counts it."""
    revision: int = -1
    ends: dict[int, tuple[Outcome, int]] = field(default_factory=dict[int, tuple[Outcome, int]])
    """Revision -> outcome, and the step of its manifest."""


@dataclass(kw_only=True)
class _Given:
    is_retracted: bool = False
    reason: LeftOutReason | None = None
    samples: dict[str, None] = field(default_factory=dict[str, None])
    user: tuple[str, str] | None = None
    """Tenant and user who may have given it in a burst; a trusted key never does."""
    times: list[float] = field(default_factory=list[float])
    """When it and its amendments came: the first, and the newest."""
    preferred: set[int] = field(default_factory=set[int])
    """Steps that train it as a judgment or a correction."""


class FeedbackFates:
    """Feedback and samples by id, and the steps that were taken."""

    def __init__(self, num_max: int = NUM_KNOWN_MAX) -> None:
        self._num_max = num_max
        self._given: OrderedDict[str, _Given] = OrderedDict()
        self._samples: OrderedDict[str, _Sample] = OrderedDict()
        self._skipped: OrderedDict[int, None] = OrderedDict()
        self._bursts: OrderedDict[str, FeedbackQuarantined] = OrderedDict()
        self._by_user: dict[tuple[str, str], dict[str, None]] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._roots: OrderedDict[str, str] = OrderedDict()
        """Amendment -> the first that it amends."""
        self._step = 0

    def received(self, event: FeedbackReceived, at: float) -> None:
        """Note a piece of feedback; its amendments are part of it.

        Args:
            event: The feedback.
            at: When the log took it, unix seconds.

        """
        root = feedback_key(event.tenant, event.amends or event.feedback_id)
        given = self._of(root)
        if event.amends:
            self._roots[event.key()] = root
            _bound(self._roots, self._num_max)
        if event.is_trusted:
            return
        given.user = (event.tenant, event.user)
        given.times.append(at)
        if len(given.times) > NUM_TIMES_MAX:
            del given.times[1]

    def quarantined(self, event: FeedbackQuarantined) -> None:
        """Note a burst: what its user gives from its beginning to its end is held."""
        self._bursts[event.key()] = event
        self._by_user.setdefault((event.tenant, event.user), {})[event.key()] = None
        if len(self._bursts) > self._num_max:
            name, oldest = self._bursts.popitem(last=False)
            user = (oldest.tenant, oldest.user)
            del self._by_user[user][name]
            if not self._by_user[user]:
                del self._by_user[user]

    def released(self, event: QuarantineReleased) -> None:
        """Note that a burst counts after all."""
        self._released[event.quarantine] = None
        _bound(self._released, self._num_max)

    def retracted(self, event: FeedbackRetracted) -> None:
        """Note that it was taken back."""
        self._of(event.key()).is_retracted = True

    def left_out(self, event: FeedbackLeftOut) -> None:
        """Note that the join leaves it out."""
        self._of(event.key()).reason = event.reason

    def joined(self, event: LiveSampleJoined) -> None:
        """Note which feedback a revision counts."""
        sample = self._sample(event.sample_id)
        for key in event.feedback_ids:
            self._of(key).samples[event.sample_id] = None
            first = sample.listed.setdefault(key, event.revision)
            sample.listed[key] = min(first, event.revision)
        if event.revision > sample.revision:
            sample.revision, sample.counting = event.revision, set(event.feedback_ids)

    def batch(self, event: BatchManifest) -> None:
        """Note what a step takes, and what it leaves out."""
        for entry in event.live:
            ends = self._sample(entry.rollout_id).ends
            ends[entry.revision] = (entry.outcome, event.step)
        for preference in event.preferences:
            if preference.fate is PreferenceFate.TRAINED:
                root = self._roots.get(preference.feedback, preference.feedback)
                self._of(root).preferred.add(event.step)

    def step(self, event: StepCompleted) -> None:
        """Note that a step was taken, or skipped."""
        self._step = max(self._step, event.step)
        if event.skipped:
            self._skipped[event.step] = None
            _bound(self._skipped, self._num_max)

    def fate(self, key: str) -> dict[str, Any]:
        """Return what became of a piece of feedback, by its log key.

        `status` is one word, `versions` are those that trained it, `reason` says why it is not
        trained, where it is not.
        """
        given = self._given.get(key)
        if given is None:
            return {"status": "unknown", "versions": [], "samples": [], "reason": "long ago"}
        samples = [
            self._of_sample(name, self._samples[name], key)
            for name in given.samples
            if name in self._samples
        ]
        preferred = {step for step in given.preferred if step not in self._skipped}
        versions = {version for sample in samples for version in sample["versions"]}
        versions |= {step for step in preferred if step <= self._step}
        status, reason = self._status(given, samples)
        if versions and not given.is_retracted and given.reason is None:
            status, reason = "trained", ""
        elif preferred and not given.is_retracted and given.reason is None:
            status, reason = "training", ""
        return {
            "status": status,
            "versions": sorted(versions),
            "samples": samples,
            "reason": reason,
        }

    def _status(self, given: _Given, samples: list[dict[str, Any]]) -> tuple[str, str]:
        if given.is_retracted:
            return "retracted", ""
        if given.reason is not None:
            status = "capped" if given.reason is LeftOutReason.CAPPED else "refused"
            return status, str(given.reason)
        found = [sample["status"] for sample in samples]
        for status in ("trained", "training", "joined"):
            if status in found:
                return status, ""
        if (burst := self._held_in(given)) is not None:
            return "quarantined", burst
        return (found[-1], found[-1]) if found else ("waiting", "")

    def _held_in(self, given: _Given) -> str | None:
        """Return the name of the burst that a piece of feedback is held in."""
        for name in self._by_user.get(given.user, {}) if given.user else ():
            burst = self._bursts[name]
            if name not in self._released and any(
                burst.began_at <= at < burst.ends_at for at in given.times
            ):
                return name
        return None

    def _of_sample(self, name: str, sample: _Sample, key: str) -> dict[str, Any]:
        first = sample.listed[key]
        ends = {n: end for n, end in sorted(sample.ends.items()) if n >= first}
        trained = [step for outcome, step in ends.values() if outcome.is_trained]
        versions = [step for step in trained if step <= self._step and step not in self._skipped]
        return {
            "sample_id": name,
            "status": self._sample_status(sample, key, ends, versions),
            "versions": versions,
        }

    def _sample_status(
        self, sample: _Sample, key: str, ends: dict[int, tuple[Outcome, int]], versions: list[int]
    ) -> str:
        if versions:
            return "trained"
        if key not in sample.counting:
            return "superseded"
        if not ends:
            return "joined"
        outcome, step = ends[max(ends)]
        if outcome.is_trained:
            return "skipped" if step in self._skipped else "training"
        is_settled = any(
            earlier.is_trained and at not in self._skipped for earlier, at in sample.ends.values()
        )
        return "unchanged" if outcome is Outcome.FILTERED and is_settled else str(outcome)

    def _of(self, key: str) -> _Given:
        given = self._given.setdefault(key, _Given())
        _bound(self._given, self._num_max)
        return given

    def _sample(self, name: str) -> _Sample:
        sample = self._samples.setdefault(name, _Sample())
        _bound(self._samples, self._num_max)
        return sample


def _bound(table: OrderedDict[Any, Any], num_max: int) -> None:
    while len(table) > num_max:
        table.popitem(last=False)
