"""The join of requests and feedback: a pure state machine; time is given.

```
 InferenceRecorded (with consent) ──▶ session ──reward_wait_s──▶ a reward? ──▶ sample, revision 0
 FeedbackReceived, before or after ──▶   │                          │ no: default_reward, or wait
 FeedbackRetracted, before or after ──▶  │                          ▼
                                         │             another reward later ──▶ revision 1, 2 ...
                                         └── late_s_max ──▶ forgotten; feedback is left out
```
A sample's turns are fixed with its first revision; later turns of the session become another one.
`due` only looks: what the log has is what counts (`note_joined`), so of two joins, or of one that
was killed, only the stored revisions matter. The order of events does not, but for the newest
amendment of a piece of feedback, and the latest of a user's signals of one name.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from penstock.actors.feedback.config import JoinConfig
from penstock.actors.feedback.sessions import SIGNALS_MAX, Rated, Signal, UserSession, refusal
from penstock.actors.runtime.fair_table import FairTable
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
    tenant_of,
)
from penstock.messages.signals.declaration import by_name

SIGNAL_WAIT_S = 1.0
"""After a signal: those of one action come together."""
ECHO_S_MAX = 60.0
"""A revision that the log does not show for so long is published again."""


class JoinCounts(msgspec.Struct, kw_only=True):
    """What became of requests and feedback."""

    num_without_consent: int = 0
    num_joined: int = 0
    num_revised: int = 0
    num_defaulted: int = 0
    num_dropped: int = 0
    """Requests that got no reward in time, or found no room."""
    num_left_out: int = 0
    """Feedback that will not count."""


class _ClosedRequest(NamedTuple):
    tenant: str
    reason: LeftOutReason


class FeedbackJoin:
    """Sessions with their feedback, and feedback that waits for its request."""

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._signal_wait_s = min(SIGNAL_WAIT_S, config.reward_wait_s)
        self._declared = by_name(config.signals)
        num_max = config.num_open_max
        self._sessions: FairTable[str, UserSession] = FairTable(
            num_max,
            lambda _, session: session.tenant,
            weight=lambda session: len(session.turns),
            on_drop=lambda _, session: self._close_session(session, LeftOutReason.LATE),
        )
        """By tenant, user and session."""
        self._place: dict[str, str] = {}
        """Request -> its session's key."""
        self._early: FairTable[str, dict[str, Signal]] = FairTable(
            num_max,
            lambda _, signals: next((one.event.tenant for one in signals.values()), ""),
            on_drop=lambda _, signals: self._leave_out_early(signals),
        )
        """Request that is not recorded yet -> its signals."""
        self._retracted: FairTable[str, None] = FairTable(num_max, lambda key, _: tenant_of(key))
        """Log keys of feedback."""
        self._closed: FairTable[str, _ClosedRequest] = FairTable(num_max, lambda _, one: one.tenant)
        """Requests without consent, or forgotten."""
        self._wake: list[tuple[float, str]] = []
        self._published: OrderedDict[str, float] = OrderedDict()
        """Key of a revision that the log does not show yet -> when it was published."""
        self._left_out: deque[FeedbackLeftOut] = deque()
        self._order = itertools.count()
        self.counts = JoinCounts()

    @property
    def num_open(self) -> int:
        """Requests that are remembered."""
        return len(self._place)

    def add_record(self, record: InferenceRecorded, now: float) -> None:
        """Take in a request; of one without consent the feedback is left out."""
        request_id = record.request_id
        if request_id in self._closed or request_id in self._place:
            return
        if not record.training_consent:
            self._refuse(request_id, record.tenant)
            return
        early = self._early.pop(request_id, None) or {}
        key = f"{record.tenant} {record.user} {record.session_id}"
        session = self._sessions.get(key)
        if session is None:
            session = UserSession(
                session_id=record.session_id, tenant=record.tenant, user=record.user
            )
        session.add(record, now)
        self._place[request_id] = key
        # Now that it has grown: the tenant with the most may have to give way.
        self._sessions[key] = session
        for root, signal in early.items():
            if reason := refusal(signal.event, self._declared, session.tenant):
                self._leave_out(signal.event, reason)
            else:
                session.signals[root] = signal
        self._touch(key, session, now + self._config.reward_wait_s)

    def add_counted(self, request_id: str, tenant: str = "") -> None:
        """Take in a request that may not be stored: its feedback is left out."""
        if request_id not in self._closed and request_id not in self._place:
            self._refuse(request_id, tenant)

    def add_feedback(self, event: FeedbackReceived, now: float) -> None:
        """Note a signal, before or after its request."""
        root = feedback_key(event.tenant, event.amends or event.feedback_id)
        if root in self._retracted:
            return
        if closed := self._closed.get(event.request_id):
            self._leave_out(event, closed.reason)
            return
        key = self._place.get(event.request_id)
        session = self._sessions[key] if key is not None else None
        known = session.signals if session else self._early.get(event.request_id, {})
        earlier = known.get(root)
        if earlier is not None and not event.amends:
            return
        reason = refusal(event, self._declared, session.tenant) if session else None
        if earlier is None and len(known) >= SIGNALS_MAX:
            reason = LeftOutReason.CAPPED
        if reason:
            self._leave_out(event, reason)
            return
        order = earlier.order if earlier else next(self._order)
        known[root] = Signal(root=root, order=order, event=event)
        if key is not None and session is not None:
            self._touch(key, session, now + self._signal_wait_s)
        else:
            self._early[event.request_id] = known

    def retract(self, event: FeedbackRetracted, now: float) -> None:
        """Forget a signal, also one that comes later."""
        root = event.key()
        self._retracted[root] = None
        self._early.get(event.request_id, {}).pop(root, None)
        key = self._place.get(event.request_id)
        if key is not None:
            session = self._sessions[key]
            session.signals.pop(root, None)
            self._touch(key, session, now + self._signal_wait_s)

    def note_joined(self, event: LiveSampleJoined, now: float) -> None:
        """Take in a revision that the log has: this join's, or that of one before a restart."""
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

    def erase(self, event: ErasureRequested) -> None:
        """Forget a user's sessions: nothing more is made of them."""
        of_user = (event.tenant, event.user)
        for key, session in list(self._sessions.items()):
            if (session.tenant, session.user) == of_user:
                self._forget(key, LeftOutReason.ERASED)

    def withdraw(self, event: ConsentWithdrawn) -> None:
        """Forget the sessions whose requests must not be trained any more."""
        for key, session in list(self._sessions.items()):
            turns = session.turns.values()
            if any(event.covers(session.tenant, [turn.key_id], turn.recorded_at) for turn in turns):
                self._forget(key, LeftOutReason.NO_CONSENT)

    def left_out(self) -> Iterator[FeedbackLeftOut]:
        """Yield what was found since the last call: feedback that will not count, and why."""
        while self._left_out:
            yield self._left_out.popleft()

    def due(self, now: float) -> Iterator[LiveSampleJoined]:
        """Yield the samples and revisions that can be published now, in a fixed order."""
        self._expire(now)
        ready: dict[str, None] = {}
        while self._wake and self._wake[0][0] <= now:
            ready[heapq.heappop(self._wake)[1]] = None
        for key in ready:
            session = self._sessions.get(key)
            if session is None:
                continue
            if now < session.ready_at:
                self._sleep(key, session.ready_at)
                continue
            for event in self._found(session, now):
                if self._published.get(event.key(), -ECHO_S_MAX) + ECHO_S_MAX <= now:
                    self._published[event.key()] = now
                    while len(self._published) > self._config.num_open_max:
                        self._published.popitem(last=False)
                    yield event
                self._sleep(key, now + ECHO_S_MAX)
            if (matures_at := session.matures_at(self._declared, now)) is not None:
                self._sleep(key, matures_at)

    def _found(self, session: UserSession, now: float) -> Iterator[LiveSampleJoined]:
        """Yield what the log should have of a session and does not."""
        for stored in session.samples.values():
            turns = [session.turns[name] for name in stored.request_ids]
            if any(self._is_unread(root, session) for root in stored.feedback_ids):
                continue
            rated = session.rate(turns, self._declared, now)
            # It had the default reward and still has no other.
            if rated.is_empty and not stored.feedback_ids and stored.revision == 0:
                continue
            revised = session.sample(turns, rated, stored.revision + 1)
            if _content(revised) == _content(stored):
                continue
            if revised.revision >= self._config.revisions_max:
                self._cap(session, revised, stored)
                continue
            self.counts.num_revised += 1
            yield revised
        for turns in session.open:
            rated = session.rate(turns, self._declared, now)
            if rated.is_empty and self._config.default_reward is not None:
                rated = Rated(rewards=[self._config.default_reward] * len(turns), roots=[])
                self.counts.num_defaulted += len(turns)
            if not rated.is_empty:
                self.counts.num_joined += 1
                yield session.sample(turns, rated, 0)

    def _is_unread(self, root: str, session: UserSession) -> bool:
        """Whether the log has a signal that was not read yet (after a restart)."""
        return root not in session.signals and root not in self._retracted

    def _cap(
        self, session: UserSession, revised: LiveSampleJoined, stored: LiveSampleJoined
    ) -> None:
        for root in sorted(set(revised.feedback_ids) - set(stored.feedback_ids)):
            self._leave_out(session.signals.pop(root).event, LeftOutReason.CAPPED)

    def _touch(self, key: str, session: UserSession, until: float) -> None:
        """Publish nothing of a session until then: more may come."""
        session.ready_at = max(session.ready_at, until)
        self._sleep(key, session.ready_at)

    def _sleep(self, key: str, until: float) -> None:
        heapq.heappush(self._wake, (until, key))

    def _expire(self, now: float) -> None:
        # Of each tenant, as long as one is due: the table keeps a tenant's in order of use.
        while due := [
            key
            for key, session in self._sessions.oldest()
            if now - next(reversed(session.turns.values())).at >= self._config.late_s_max
        ]:
            for key in due:
                self._forget(key)

    def _forget(self, key: str, reason: LeftOutReason = LeftOutReason.LATE) -> None:
        self._close_session(self._sessions.pop(key), reason)

    def _close_session(self, session: UserSession, reason: LeftOutReason) -> None:
        joined = {root for sample in session.samples.values() for root in sample.feedback_ids}
        for root, signal in session.signals.items():
            if root not in joined and not self._declared[signal.event.name].kind.is_text:
                self._leave_out(signal.event, reason)
        for request_id in session.turns:
            del self._place[request_id]
            self.counts.num_dropped += request_id not in session.sample_of
            self._closed[request_id] = _ClosedRequest(session.tenant, reason)

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

    def _leave_out_early(self, signals: dict[str, Signal]) -> None:
        for signal in signals.values():
            self._leave_out(signal.event, LeftOutReason.UNKNOWN_REQUEST)

    def _refuse(self, request_id: str, tenant: str) -> None:
        """Make nothing of a request without consent, and leave out its feedback."""
        self.counts.num_without_consent += 1
        self._closed[request_id] = _ClosedRequest(tenant, LeftOutReason.NO_CONSENT)
        for signal in (self._early.pop(request_id, None) or {}).values():
            self._leave_out(signal.event, LeftOutReason.NO_CONSENT)


def _content(sample: LiveSampleJoined) -> tuple[object, ...]:
    """Return what a revision is made for: rewards, and whose they are."""
    return sample.reward, sample.turn_rewards, sample.unrated, sample.feedback_ids
