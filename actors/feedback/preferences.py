"""Turns corrections and clear judgments of replies into preference pairs and labels. Pure.

```
 InferenceRecorded (with consent) ─▶ known ─┐
 FeedbackReceived, before or after ─────────┴─▶ PreferencePair (correction) or Label (clear score)
```
"""

from collections.abc import Iterator

import msgspec

from penstock.actors.feedback.config import JoinConfig
from penstock.actors.feedback.sessions import SIGNALS_MAX, refusal
from penstock.actors.runtime.fair_table import FairTable
from penstock.messages.feedback import (
    ConsentWithdrawn,
    FeedbackReceived,
    InferenceRecorded,
    feedback_key,
    owner_of,
)
from penstock.messages.signals.declaration import SignalKind, SignalLevel, by_name
from penstock.messages.signals.preferences import Label, PreferencePair

CLEAR = 0.5
"""Minimum magnitude of a score, in [-1, 1], that counts as good or bad."""


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    user: str
    policy_version: int
    has_consent: bool
    is_external: bool
    key_id: str
    at: float


class Preferences:
    """Recent requests, and feedback that arrived before its request."""

    def __init__(self, config: JoinConfig) -> None:
        self._num_max = config.num_open_max
        self._declared = by_name(config.signals)
        self._requests: FairTable[str, _Request] = FairTable(
            self._num_max, lambda _, request: request.tenant
        )
        self._early: FairTable[str, list[FeedbackReceived]] = FairTable(
            self._num_max, lambda _, waiting: waiting[0].tenant
        )

    def add_record(self, record: InferenceRecorded) -> Iterator[PreferencePair | Label]:
        """Add a request; yield the pairs and labels of feedback that arrived before it."""
        self._requests[record.request_id] = request = _Request(
            tenant=record.tenant,
            user=record.user,
            policy_version=record.policy_version,
            has_consent=record.training_consent,
            is_external=record.is_external,
            key_id=record.key_id,
            at=record.recorded_at,
        )
        for event in self._early.pop(record.request_id, []):
            yield from self._read(event, request)

    def add_feedback(self, event: FeedbackReceived) -> Iterator[PreferencePair | Label]:
        """Yield the pair or label of a piece of feedback, if its request is known."""
        request = self._requests.get(event.request_id)
        if request is not None:
            yield from self._read(event, request)
            return
        waiting = self._early.get(event.request_id)
        if waiting is None:
            self._early[event.request_id] = [event]
        # Bounded per request: anybody may send feedback on an id that does not exist.
        elif len(waiting) < SIGNALS_MAX:
            waiting.append(event)

    def withdraw(self, event: ConsentWithdrawn) -> None:
        """Read no more feedback on requests that must not be trained anymore."""
        for name, request in list(self._requests.items()):
            if event.covers(request.tenant, [request.key_id], request.at):
                self._requests[name] = msgspec.structs.replace(request, has_consent=False)

    def _read(self, event: FeedbackReceived, request: _Request) -> Iterator[PreferencePair | Label]:
        if not request.has_consent or refusal(event, self._declared, request.tenant):
            return
        spec = self._declared[event.name]
        root = feedback_key(event.tenant, event.amends or event.feedback_id)
        is_pair = spec.kind is SignalKind.CORRECTION and event.content is not None
        # An external session has many replies; nobody knows which of them was corrected.
        if is_pair and not request.is_external:
            yield PreferencePair(
                feedback=event.key(),
                root=root,
                request_id=event.request_id,
                tenant=request.tenant,
                user=request.user,
                author=owner_of(event.tenant, event.user),
                policy_version=request.policy_version,
                key_id=request.key_id,
                recorded_at=request.at,
            )
        score, weight = spec.score(event.value), spec.weight * event.weight
        is_whole = spec.level is SignalLevel.REQUEST or request.is_external
        if is_whole and abs(score) >= CLEAR and weight > 0:
            yield Label(
                feedback=event.key(),
                root=root,
                request_id=event.request_id,
                name=event.name,
                is_desirable=score > 0,
                weight=weight,
                tenant=request.tenant,
                user=request.user,
                policy_version=request.policy_version,
                key_id=request.key_id,
                recorded_at=request.at,
            )
