"""The join of requests and feedback: a pure state machine, with time as an argument.

```
 InferenceRecorded (with consent) ──▶ session ──reward_wait_s──▶ a reward? ──▶ sample, revision 0
 FeedbackReceived, before or after ──▶   │                          │ no: default_reward, or wait
 FeedbackRetracted, before or after ──▶  │                          ▼
                                         │             another reward later ──▶ revision 1, 2 ...
                                         └── late_s_max ──▶ forgotten; feedback is left out
```
A sample's turns are fixed with its first revision; later turns of the session become another
sample. `due` does not change samples: only revisions stored in the log count (`note_joined`), which
makes restarts and a second joiner harmless. The order of events matters only for amendments of one
piece of feedback and for a user's repeated signals of one name.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.actors.feedback.config import JoinConfig
from penstock.actors.feedback.sessions import SIGNALS_MAX, Signal, TurnRatings, UserSession, refusal
from penstock.messages.feedback import (
    ConsentWithdrawn,
    ErasureRequested,
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    InferenceRecorded,
    LeftOutReason,
    LiveSampleJoined,
    feedback_key,
)
from penstock.messages.signals.declaration import by_name

SIGNAL_WAIT_S = 1.0
"""Seconds to wait after a signal for others of the same user action."""
ECHO_S_MAX = 60.0
"""Seconds after which a revision that the log does not show is published again."""


class JoinCounts(msgspec.Struct, kw_only=True):
    """Counts of requests and feedback by what became of them."""

    num_without_consent: int = 0
    num_joined: int = 0
    num_revised: int = 0
    num_defaulted: int = 0
    num_dropped: int = 0
    """Requests forgotten without a reward."""
    num_left_out: int = 0
    """Pieces of feedback that do not count."""


class FeedbackJoin:
    """Sessions with their feedback, and feedback that waits for its request."""

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._signal_wait_s = min(SIGNAL_WAIT_S, config.reward_wait_s)
        self._declared = by_name(config.signals)
        self._sessions: OrderedDict[str, UserSession] = OrderedDict()
        """Sessions by "tenant user session", least recently used first."""
        self._place: dict[str, str] = {}
        """Session key by request."""
        self._early: OrderedDict[str, dict[str, Signal]] = OrderedDict()
        """Signals by request that is not recorded yet."""
        self._retracted: OrderedDict[str, None] = OrderedDict()
        self._closed: OrderedDict[str, LeftOutReason] = OrderedDict()
        """Requests without consent, and forgotten ones."""
        self._wake: list[tuple[float, str]] = []
        """Heap of (time, session key); entries may be outdated, `due` checks `ready_at`."""
        self._published: OrderedDict[str, float] = OrderedDict()
        """Time of publication by revision that the log does not show yet."""
        self._left_out: deque[FeedbackLeftOut] = deque()
        self._order = itertools.count()
        self.counts = JoinCounts()

    @property
    def num_open(self) -> int:
        """Number of requests remembered."""
        return len(self._place)

    def add_record(self, record: InferenceRecorded, now: float) -> None:
        """Add a request; without consent, its feedback is left out."""
        request_id = record.request_id
        if request_id in self._closed or request_id in self._place:
            return
        if not record.training_consent:
            self._refuse(request_id)
            return
        early = self._early.pop(request_id, {})
        key = f"{record.tenant} {record.user} {record.session_id}"
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = UserSession(
                session_id=record.session_id, tenant=record.tenant, user=record.user
            )
        session.add(record, now)
        for root, signal in early.items():
            if reason := refusal(signal.event, self._declared, session.tenant):
                self._leave_out(signal.event, reason)
            else:
                session.signals[root] = signal
        self._place[request_id] = key
        self._sessions.move_to_end(key)
        self._touch(key, session, now + self._config.reward_wait_s)
        while len(self._place) > self._config.num_open_max:
            self._forget(next(iter(self._sessions)))

    def add_counted(self, request_id: str) -> None:
        """Add a request that may not be stored, whose feedback is left out."""
        if request_id not in self._closed and request_id not in self._place:
            self._refuse(request_id)

    def add_feedback(self, event: FeedbackReceived, now: float) -> None:
        """Add a signal, before or after its request."""
        root = feedback_key(event.tenant, event.amends or event.feedback_id)
        if root in self._retracted:
            return
        if reason := self._closed.get(event.request_id):
            self._leave_out(event, reason)
            return
        key = self._place.get(event.request_id)
        session = self._sessions[key] if key is not None else None
        known = session.signals if session else self._early.setdefault(event.request_id, {})
        earlier = known.get(root)
        # A repeated delivery of the same signal.
        if earlier is not None and not event.amends:
            return
        reason = refusal(event, self._declared, session.tenant) if session else None
        if earlier is None and len(known) >= SIGNALS_MAX:
            reason = LeftOutReason.CAPPED
        if reason:
            self._leave_out(event, reason)
            return
        # An amendment keeps its place, so that it does not overrule a later signal.
        order = earlier.order if earlier else next(self._order)
        known[root] = Signal(root=root, order=order, event=event, at=now)
        if key is not None and session is not None:
            self._touch(key, session, now + self._signal_wait_s)
        while len(self._early) > self._config.num_open_max:
            _, signals = self._early.popitem(last=False)
            for signal in signals.values():
                self._leave_out(signal.event, LeftOutReason.UNKNOWN_REQUEST)

    def retract(self, event: FeedbackRetracted, now: float) -> None:
        """Drop a signal, even if it arrives later."""
        root = event.key()
        self._retracted[root] = None
        self._bound(self._retracted)
        self._early.get(event.request_id, {}).pop(root, None)
        key = self._place.get(event.request_id)
        if key is not None:
            session = self._sessions[key]
            session.signals.pop(root, None)
            self._touch(key, session, now + self._signal_wait_s)

    def note_joined(self, event: LiveSampleJoined, now: float) -> None:
        """Record a stored revision, of this process or the one before a restart."""
        self._published.pop(event.key(), None)
        key = self._place.get(event.request_ids[0])
        if key is None:
            return
        session = self._sessions[key]
        stored = session.samples.get(event.sample_id)
        if stored is None or stored.revision < event.revision:
            session.samples[event.sample_id] = event
            for request_id in event.request_ids:
                session.sample_of[request_id] = event.sample_id
        self._sleep(key, max(now, session.ready_at))

    def knows(self, request_id: str) -> bool:
        """Return whether a request is remembered, and its session with it."""
        return request_id in self._place

    def offer_again(self, samples: Iterable[LiveSampleJoined]) -> None:
        """Look at the sessions of samples once more that were offered and not published."""
        for sample in samples:
            self._published.pop(sample.key(), None)
            if (key := self._place.get(sample.sample_id)) is not None:
                self._sleep(key, self._sessions[key].ready_at)

    def erase(self, event: ErasureRequested) -> None:
        """Forget a user's sessions."""
        of_user = (event.tenant, event.user)
        for key, session in list(self._sessions.items()):
            if (session.tenant, session.user) == of_user:
                self._forget(key, LeftOutReason.ERASED)

    def withdraw(self, event: ConsentWithdrawn) -> None:
        """Forget the sessions whose requests must not be trained anymore."""
        for key, session in list(self._sessions.items()):
            turns = session.turns.values()
            if any(event.covers(session.tenant, [turn.key_id], turn.recorded_at) for turn in turns):
                self._forget(key, LeftOutReason.NO_CONSENT)

    def left_out(self) -> Iterator[FeedbackLeftOut]:
        """Yield feedback that does not count, with the reason, since the last call."""
        while self._left_out:
            yield self._left_out.popleft()

    def due(self, now: float) -> Iterator[LiveSampleJoined]:
        """Yield the samples and revisions that can be published now, in a deterministic order."""
        self._expire(now)
        ready: dict[str, None] = {}
        while self._wake and self._wake[0][0] <= now:
            ready[heapq.heappop(self._wake)[1]] = None
        for key in ready:
            session = self._sessions.get(key)
            if session is None:
                continue
            # More signals came since this entry was pushed; a later entry wakes the session.
            if now < session.ready_at:
                self._sleep(key, session.ready_at)
                continue
            for event in self._new_revisions(session, now):
                if self._published.get(event.key(), -ECHO_S_MAX) + ECHO_S_MAX <= now:
                    self._published[event.key()] = now
                    self._bound(self._published)
                    yield event
                self._sleep(key, now + ECHO_S_MAX)
            if (matures_at := session.matures_at(self._declared, now)) is not None:
                self._sleep(key, matures_at)

    def _new_revisions(self, session: UserSession, now: float) -> Iterator[LiveSampleJoined]:
        for stored in session.samples.values():
            turns = [session.turns[name] for name in stored.request_ids]
            # After a restart, the log may have signals that were not read yet: without them the
            # revision would look changed.
            known = session.signals.keys() | self._retracted.keys()
            if not known >= {*stored.feedback_ids}:
                continue
            rated = session.rate(turns, self._declared, now)
            # It has the default reward, and no signal has arrived since.
            if rated.is_empty and not stored.feedback_ids and stored.revision == 0:
                continue
            revised = session.sample(turns, rated, stored.revision + 1)
            if _content(revised) == _content(stored):
                continue
            # Bounded, because each revision of a trained sample costs a change in a later batch.
            if revised.revision >= self._config.revisions_max:
                self._cap(session, revised, stored)
                continue
            self.counts.num_revised += 1
            yield revised
        for turns in session.open:
            rated = session.rate(turns, self._declared, now)
            if rated.is_empty and self._config.default_reward is not None:
                rated = TurnRatings(rewards=[self._config.default_reward] * len(turns), roots=[])
                self.counts.num_defaulted += len(turns)
            if not rated.is_empty:
                self.counts.num_joined += 1
                yield session.sample(turns, rated, 0)

    def _cap(
        self, session: UserSession, revised: LiveSampleJoined, stored: LiveSampleJoined
    ) -> None:
        for root in sorted(set(revised.feedback_ids) - set(stored.feedback_ids)):
            self._leave_out(session.signals.pop(root).event, LeftOutReason.CAPPED)

    def _touch(self, key: str, session: UserSession, until: float) -> None:
        session.ready_at = max(session.ready_at, until)
        self._sleep(key, session.ready_at)

    def _sleep(self, key: str, until: float) -> None:
        heapq.heappush(self._wake, (until, key))

    def _expire(self, now: float) -> None:
        while self._early:
            request_id, signals = next(iter(self._early.items()))
            newest_at = max((signal.at for signal in signals.values()), default=0.0)
            if now - newest_at < self._config.late_s_max:
                break
            del self._early[request_id]
            for signal in signals.values():
                self._leave_out(signal.event, LeftOutReason.UNKNOWN_REQUEST)
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            newest = next(reversed(session.turns.values()))
            if now - newest.at < self._config.late_s_max:
                return
            self._forget(key)

    def _forget(self, key: str, reason: LeftOutReason = LeftOutReason.LATE) -> None:
        session = self._sessions.pop(key)
        joined = {root for sample in session.samples.values() for root in sample.feedback_ids}
        for root, signal in session.signals.items():
            # Texts have no score; corrections go another way (`preferences.py`).
            if root not in joined and not self._declared[signal.event.name].kind.is_text:
                self._leave_out(signal.event, reason)
        for request_id in session.turns:
            del self._place[request_id]
            self.counts.num_dropped += request_id not in session.sample_of
            self._close(request_id, reason)

    def _leave_out(self, event: FeedbackReceived, reason: LeftOutReason) -> None:
        self.counts.num_left_out += 1
        self._left_out.append(
            FeedbackLeftOut(
                feedback_id=event.amends or event.feedback_id,
                request_id=event.request_id,
                tenant=event.tenant,
                user=event.user,
                reason=reason,
            )
        )

    def _refuse(self, request_id: str) -> None:
        self.counts.num_without_consent += 1
        self._close(request_id, LeftOutReason.NO_CONSENT)
        for signal in self._early.pop(request_id, {}).values():
            self._leave_out(signal.event, LeftOutReason.NO_CONSENT)

    def _close(self, request_id: str, reason: LeftOutReason) -> None:
        self._closed[request_id] = reason
        self._bound(self._closed)

    def _bound(self, table: OrderedDict[str, Any]) -> None:
        while len(table) > self._config.num_open_max:
            table.popitem(last=False)


def _content(sample: LiveSampleJoined) -> tuple[object, ...]:
    return sample.reward, sample.turn_rewards, sample.unrated, sample.feedback_ids
