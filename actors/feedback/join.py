"""The join of requests and feedback: a pure state machine; time is given.

```
 InferenceRecorded (with consent) ──▶ open ──reward_wait_s──▶ due ──a reward?──▶ joined, once
 FeedbackReceived, before or after ──▶  │                      │ no: default_reward, or wait on
 FeedbackRetracted, before or after ──▶ │                      └──▶ late_s_max ──▶ dropped
```
What is left of the feedback at the moment of joining makes the reward; the order in which the
events came does not matter, but for the newest amendment of a piece of feedback, which counts.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.actors.feedback.signals import DEFAULT_WEIGHTS, is_known, reward_of
from penstock.messages.errors import ConfigError
from penstock.messages.feedback import (
    FeedbackReceived,
    FeedbackRetracted,
    InferenceRecorded,
    LiveSampleJoined,
    feedback_key,
)
from penstock.messages.settings import NonNegativeFloat, PositiveInt

NUM_SIGNALS_MAX = 64
"""Pieces of feedback on one request; more are passed over."""


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How feedback becomes a reward."""

    reward_wait_s: NonNegativeFloat = 5.0
    """A request is joined no sooner, so that several signals can come together."""
    default_reward: float | None = None
    """Reward of a request that got no feedback in time; None leaves it out of training."""
    late_s_max: NonNegativeFloat = 7 * 86_400.0
    """Without feedback for this long, a request is dropped."""
    num_open_max: PositiveInt = 10_000
    """Requests that wait; then the oldest is dropped. As many orphaned signals are kept."""
    weights: dict[str, float] = msgspec.field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    """Signal name -> weight in the mean."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        for name in self.weights:
            if not is_known(name):
                raise ConfigError(f"feedback_join.weights.{name}: no such signal")
        if self.late_s_max < self.reward_wait_s:
            text = f"expected at least reward_wait_s {self.reward_wait_s}, got {self.late_s_max}"
            raise ConfigError(f"feedback_join.late_s_max: {text}")


class JoinCounts(msgspec.Struct, kw_only=True):
    """What became of requests and feedback."""

    num_without_consent: int = 0
    num_joined: int = 0
    num_defaulted: int = 0
    num_dropped: int = 0
    """Requests that waited too long, or found no room."""
    num_late: int = 0
    """Feedback on requests that were joined already."""


class _Open(msgspec.Struct, kw_only=True):
    tenant: str
    sample: LiveSampleJoined
    """Without its reward, and without tokens: the record in the log has those."""
    at: float


class FeedbackJoin:
    """Requests that wait for their feedback, and feedback that waits for its request."""

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._feedback: OrderedDict[str, dict[str, FeedbackReceived]] = OrderedDict()
        """Request id -> log key (of the first, where amended) -> what counts."""
        self._retracted: OrderedDict[str, None] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        """Joined, dropped or without consent: nothing more is made of them."""
        self.counts = JoinCounts()

    @property
    def num_open(self) -> int:
        """Requests that wait."""
        return len(self._open)

    def add_record(self, record: InferenceRecorded, now: float) -> None:
        """Open a request; without consent it is closed at once and its feedback forgotten."""
        request_id = record.request_id
        if request_id in self._closed or request_id in self._open:
            return
        if not record.training_consent:
            self.counts.num_without_consent += 1
            self._close(request_id)
            return
        self._open[request_id] = _Open(tenant=record.tenant, sample=_unrewarded(record), at=now)
        if len(self._open) > self._config.num_open_max:
            self._drop(next(iter(self._open)))

    def add_feedback(self, event: FeedbackReceived) -> None:
        """Note a signal, before or after its request."""
        root = feedback_key(event.tenant, event.amends or event.feedback_id)
        if event.request_id in self._closed:
            self.counts.num_late += 1
            return
        if root in self._retracted:
            return
        signals = self._feedback.setdefault(event.request_id, {})
        if root not in signals and len(signals) >= NUM_SIGNALS_MAX:
            return
        if event.amends or root not in signals:
            signals[root] = event
        self._bound(self._feedback)

    def retract(self, event: FeedbackRetracted) -> None:
        """Forget a signal, also one that comes later."""
        self._retracted[event.key()] = None
        self._bound(self._retracted)
        self._feedback.get(event.request_id, {}).pop(event.key(), None)

    def note_joined(self, event: LiveSampleJoined) -> None:
        """Take in that the log has the sample already (after a restart)."""
        for request_id in event.request_ids:
            self._open.pop(request_id, None)
            self._close(request_id)

    def due(self, now: float) -> Iterator[LiveSampleJoined]:
        """Yield what can be joined now, each once, in the order of the requests."""
        for request_id, entry in list(self._open.items()):
            age_s = now - entry.at
            if age_s < self._config.reward_wait_s:
                continue
            signals = self._counting(request_id, entry.tenant)
            reward = reward_of(signals, self._config.weights)
            if reward is None and self._config.default_reward is not None:
                reward, signals = self._config.default_reward, []
                self.counts.num_defaulted += 1
            if reward is not None:
                del self._open[request_id]
                self._close(request_id)
                self.counts.num_joined += 1
                yield msgspec.structs.replace(
                    entry.sample,
                    reward=reward,
                    feedback_ids=[signal.feedback_id for signal in signals],
                )
            elif age_s >= self._config.late_s_max:
                self._drop(request_id)

    def _counting(self, request_id: str, tenant: str) -> list[FeedbackReceived]:
        """Return the feedback of the request's own tenant, and of trusted keys."""
        found = self._feedback.get(request_id, {})
        signals = [found[root] for root in sorted(found)]
        return [signal for signal in signals if signal.tenant == tenant or signal.is_trusted]

    def _drop(self, request_id: str) -> None:
        del self._open[request_id]
        self._close(request_id)
        self.counts.num_dropped += 1

    def _close(self, request_id: str) -> None:
        self._feedback.pop(request_id, None)
        self._closed[request_id] = None
        self._bound(self._closed)

    def _bound(self, table: OrderedDict[str, Any]) -> None:
        while len(table) > self._config.num_open_max:
            table.popitem(last=False)


def _unrewarded(record: InferenceRecorded) -> LiveSampleJoined:
    return LiveSampleJoined(
        sample_id=record.request_id,
        request_ids=[record.request_id],
        turns=[record.turn.summary],
        session_id=record.session_id,
        feedback_ids=[],
        reward=0.0,
        variant=record.variant,
        propensity=record.propensity,
        policy_version=record.policy_version,
        tenant=record.tenant,
        user=record.user,
    )
