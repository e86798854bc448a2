"""Tracks what became of each piece of feedback: a pure fold of the log, equal in every gateway.

```
 waiting ─LiveSampleJoined─▶ joined ─BatchManifest─▶ training ─StepCompleted─▶ trained
    │  └─ Label, PreferencePair ──────────┘ (a judgment or correction; trained next to the sample)
    │                          │                └─▶ stale, capped ...: the sample's outcome
    │                          └─ a later revision no longer counts it ─▶ superseded
    ├─ FeedbackQuarantined ─▶ quarantined ─ QuarantineReleased ─▶ waiting
    ├─ FeedbackLeftOut ─▶ refused, capped
    └─ FeedbackRetracted ─▶ retracted
```
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from penstock.actors.runtime.fair_table import FairTable
from penstock.messages.feedback import (
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    LeftOutReason,
    LiveSampleJoined,
    feedback_key,
    tenant_of,
)
from penstock.messages.reward import Outcome
from penstock.messages.signals.preferences import PreferenceFate
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased
from penstock.messages.training import BatchManifest, StepCompleted

NUM_TIMES_MAX = 8
"""Maximum times kept of a piece of feedback and its amendments."""
NUM_KNOWN_MAX = 100_000
"""Maximum pieces of feedback, and samples, to track; the oldest is forgotten."""


@dataclass(kw_only=True)
class _Sample:
    tenant: str
    counting: set[str] = field(default_factory=set[str])
    """Keys of the feedback that the newest revision counts."""
    listed: dict[str, int] = field(default_factory=dict[str, int])
    """Feedback key -> the first revision that counts it."""
    revision: int = -1
    ends: dict[int, tuple[Outcome, int]] = field(default_factory=dict[int, tuple[Outcome, int]])
    """Revision -> outcome, and the step of its manifest."""


@dataclass(kw_only=True)
class _FeedbackState:
    is_retracted: bool = False
    reason: LeftOutReason | None = None
    samples: dict[str, None] = field(default_factory=dict[str, None])
    user: tuple[str, str] | None = None
    """Tenant and user whose bursts may hold it; None for trusted keys, which are never held."""
    times: list[float] = field(default_factory=list[float])
    """Times of the feedback and its amendments: the first, then the newest."""
    preferred: set[int] = field(default_factory=set[int])
    """Steps that train it as a judgment or a correction."""


class FeedbackFates:
    """State of feedback and samples by id, and of the optimizer steps that train them."""

    def __init__(self, num_max: int = NUM_KNOWN_MAX) -> None:
        self._num_max = num_max
        self._feedback: FairTable[str, _FeedbackState] = FairTable(
            num_max, lambda key, _: tenant_of(key)
        )
        self._samples: FairTable[str, _Sample] = FairTable(num_max, lambda _, one: one.tenant)
        self._skipped: OrderedDict[int, None] = OrderedDict()
        self._bursts: OrderedDict[str, FeedbackQuarantined] = OrderedDict()
        self._by_user: dict[tuple[str, str], dict[str, None]] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._roots: FairTable[str, str] = FairTable(num_max, lambda key, _: tenant_of(key))
        """Key of an amendment -> key of the original feedback."""
        self._step = 0

    def received(self, event: FeedbackReceived, at: float) -> None:
        """Add a piece of feedback, or an amendment, which shares the fate of its original.

        Args:
            event: The feedback.
            at: When the log stored it, in Unix seconds.

        """
        root = feedback_key(event.tenant, event.amends or event.feedback_id)
        state = self._state(root)
        if event.amends:
            self._roots[event.key()] = root
        if event.is_trusted:
            return
        state.user = (event.tenant, event.user)
        state.times.append(at)
        # The first time stays whatever the number of amendments: it may lie in a burst.
        if len(state.times) > NUM_TIMES_MAX:
            del state.times[1]

    def quarantined(self, event: FeedbackQuarantined) -> None:
        """Add a burst: all feedback of its user from its start to its end is held."""
        self._bursts[event.key()] = event
        self._by_user.setdefault((event.tenant, event.user), {})[event.key()] = None
        if len(self._bursts) > self._num_max:
            # `_by_user` is an index of `_bursts`: an entry left behind would be a leak.
            name, oldest = self._bursts.popitem(last=False)
            user = (oldest.tenant, oldest.user)
            del self._by_user[user][name]
            if not self._by_user[user]:
                del self._by_user[user]

    def released(self, event: QuarantineReleased) -> None:
        """Let the feedback of a burst count after all."""
        self._released[event.quarantine] = None
        _trim(self._released, self._num_max)

    def retracted(self, event: FeedbackRetracted) -> None:
        """Mark a piece of feedback as retracted by its user."""
        self._state(event.key()).is_retracted = True

    def left_out(self, event: FeedbackLeftOut) -> None:
        """Mark a piece of feedback that the feedback join leaves out."""
        self._state(event.key()).reason = event.reason

    def joined(self, event: LiveSampleJoined) -> None:
        """Record which feedback a revision of a sample counts."""
        sample = self._sample(event.sample_id, event.tenant)
        for key in event.feedback_ids:
            self._state(key).samples[event.sample_id] = None
            # Revisions may be read out of order: an older one must not become the newest.
            first = sample.listed.setdefault(key, event.revision)
            sample.listed[key] = min(first, event.revision)
        if event.revision > sample.revision:
            sample.revision, sample.counting = event.revision, set(event.feedback_ids)

    def batch(self, event: BatchManifest) -> None:
        """Record what a step trains, and what it leaves out."""
        for entry in event.live:
            ends = self._sample(entry.rollout_id, entry.tenant).ends
            ends[entry.revision] = (entry.outcome, event.step)
        for preference in event.preferences:
            if preference.fate is PreferenceFate.TRAINED:
                root = self._roots.get(preference.feedback, preference.feedback)
                self._state(root).preferred.add(event.step)

    def step(self, event: StepCompleted) -> None:
        """Record that a step completed or was skipped."""
        self._step = max(self._step, event.step)
        if event.skipped:
            self._skipped[event.step] = None
            _trim(self._skipped, self._num_max)

    def fate(self, key: str) -> dict[str, Any]:
        """Return what became of a piece of feedback, by its log key.

        `status` is one word, `versions` lists the policy versions that trained it, and `reason`
        says why it was not trained (empty if it was, or still may be).
        """
        state = self._feedback.get(key)
        if state is None:
            return {"status": "unknown", "versions": [], "samples": [], "reason": "long ago"}
        samples = [
            self._sample_fate(name, self._samples[name], key)
            for name in state.samples
            if name in self._samples
        ]
        preferred = {step for step in state.preferred if step not in self._skipped}
        versions = {version for sample in samples for version in sample["versions"]}
        versions |= {step for step in preferred if step <= self._step}
        status, reason = self._status(state, samples)
        # A judgment or correction trains without a sample: then its steps decide the status.
        if versions and not state.is_retracted and state.reason is None:
            status, reason = "trained", ""
        elif preferred and not state.is_retracted and state.reason is None:
            status, reason = "training", ""
        return {
            "status": status,
            "versions": sorted(versions),
            "samples": samples,
            "reason": reason,
        }

    def _status(self, state: _FeedbackState, samples: list[dict[str, Any]]) -> tuple[str, str]:
        if state.is_retracted:
            return "retracted", ""
        if state.reason is not None:
            status = "capped" if state.reason is LeftOutReason.CAPPED else "refused"
            return status, str(state.reason)
        # Feedback on a session counts in several samples: the furthest one decides.
        found = [sample["status"] for sample in samples]
        for status in ("trained", "training", "joined"):
            if status in found:
                return status, ""
        if (burst := self._holding_burst(state)) is not None:
            return "quarantined", burst
        return (found[-1], found[-1]) if found else ("waiting", "")

    def _holding_burst(self, state: _FeedbackState) -> str | None:
        """Return the name of the burst that holds a piece of feedback, or None."""
        for name in self._by_user.get(state.user, {}) if state.user else ():
            burst = self._bursts[name]
            if name not in self._released and any(
                burst.began_at <= at < burst.ends_at for at in state.times
            ):
                return name
        return None

    def _sample_fate(self, name: str, sample: _Sample, key: str) -> dict[str, Any]:
        # Steps that trained an earlier revision of the sample trained without this feedback.
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
        # A revision that adds nothing to one already trained is filtered: no loss to the user.
        is_settled = any(
            earlier.is_trained and at not in self._skipped for earlier, at in sample.ends.values()
        )
        return "unchanged" if outcome is Outcome.FILTERED and is_settled else str(outcome)

    def _state(self, key: str) -> _FeedbackState:
        return self._feedback.setdefault(key, _FeedbackState())

    def _sample(self, name: str, tenant: str) -> _Sample:
        return self._samples.setdefault(name, _Sample(tenant=tenant))


def _trim(table: OrderedDict[Any, Any], num_max: int) -> None:
    while len(table) > num_max:
        table.popitem(last=False)
