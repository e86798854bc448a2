"""The feedback join as an actor: FEEDBACK in, live samples out.

While it catches up, time is that of the log: sessions are joined and forgotten as they were when
their events were stored, and nothing is published. What the log shows meanwhile was published
already; what it does not show by the end, an earlier join left undone, and this one publishes.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from penstock.actors.feedback.bursts import Bursts
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.feedback.join import FeedbackJoin
from penstock.actors.feedback.preferences import Preferences
from penstock.actors.feedback.trust import Trust
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Event
from penstock.messages.feedback import (
    ConsentWithdrawn,
    ErasureRequested,
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased

NUM_HELD_MAX = 10_000
"""Events that wait for the end of catching up. More than that no log lacks by a crash: a join that
never ran makes them, and they go out as it catches up."""

log = logging.getLogger(__name__)


class FeedbackJoiner(Actor):
    """Joins requests with their feedback; its state follows from the log."""

    role = "feedback"
    tick_s = 0.5
    saved = ("_join", "_preferences", "_bursts", "_trust", "_held", "_ticked_at")
    follows: ClassVar[tuple[type[Event], ...]] = (
        InferenceRecorded,
        InferenceCounted,
        FeedbackReceived,
        FeedbackRetracted,
        LiveSampleJoined,
        ErasureRequested,
        ConsentWithdrawn,
        QuarantineReleased,
        FeedbackQuarantined,
        FeedbackLeftOut,
        PreferencePair,
        Label,
    )

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._join = FeedbackJoin(config)
        self._preferences = Preferences(config)
        self._bursts = Bursts(config.burst)
        self._trust = Trust(config)
        self._held: OrderedDict[str, Event] = OrderedDict()
        """What was found while catching up and the log has not shown yet, by type and key."""
        self._ticked_at = 0.0
        """Time up to which samples were looked for, unix seconds."""

    async def start(self, ctx: Context) -> Effects:
        """Log the settings."""
        config = self._config
        log.info("%d signals, waits %g s for them", len(config.signals), config.reward_wait_s)
        return ()

    async def on_inference_recorded(self, event: InferenceRecorded, ctx: Context) -> Effects:
        """Open the request."""
        past = self._pass_time(ctx)
        self._join.add_record(event, ctx.stored_at)
        found = self._bursts.admit(self._preferences.add_record(event))
        return [*past, *self._found(found, ctx)]

    async def on_inference_counted(self, event: InferenceCounted, ctx: Context) -> Effects:
        """Know that nothing may be made of the request."""
        past = self._pass_time(ctx)
        self._join.add_counted(event.request_id)
        return past

    async def on_feedback_received(self, event: FeedbackReceived, ctx: Context) -> Effects:
        """Note the signal; hold it if it is one of a burst."""
        past = self._pass_time(ctx)
        self._trust.add(event)
        quarantined = self._bursts.add(event, ctx.stored_at)
        self._join.add_feedback(event, ctx.stored_at)
        found: list[Event] = [*self._bursts.admit(self._preferences.add_feedback(event))]
        if quarantined:
            found.append(quarantined)
        return [*past, *self._found(found, ctx)]

    async def on_quarantine_released(self, event: QuarantineReleased, ctx: Context) -> Effects:
        """Let the feedback of a burst count."""
        return [*self._pass_time(ctx), *self._found(self._bursts.release(event), ctx)]

    async def on_feedback_retracted(self, event: FeedbackRetracted, ctx: Context) -> Effects:
        """Forget the signal."""
        past = self._pass_time(ctx)
        self._join.retract(event, ctx.stored_at)
        return past

    async def on_live_sample_joined(self, event: LiveSampleJoined, ctx: Context) -> Effects:
        """See what the log has, of this join or of the one before a restart."""
        past = self._pass_time(ctx)
        self._join.note_joined(event, ctx.stored_at)
        await self._see(event, ctx)
        return past

    async def on_erasure_requested(self, event: ErasureRequested, ctx: Context) -> Effects:
        """Make no more samples of a user's requests."""
        past = self._pass_time(ctx)
        self._join.erase(event)
        return past

    async def _see(self, event: Event, ctx: Context) -> Effects:
        """See that the log has an event that this actor makes."""
        self._held.pop(_name(event), None)
        return ()

    on_feedback_quarantined = on_feedback_left_out = on_preference_pair = on_label = _see

    async def on_consent_withdrawn(self, event: ConsentWithdrawn, ctx: Context) -> Effects:
        """Make no more of what was recorded before."""
        past = self._pass_time(ctx)
        self._join.withdraw(event)
        self._preferences.withdraw(event)
        return past

    async def on_tick(self, ctx: Context) -> Effects:
        """Publish what is due; the log keeps one of each revision whatever happens."""
        effects: list[Event] = []
        if ctx.is_caught_up:
            effects = [*self._lacking(), *self._due(ctx.now())]
            self._ticked_at = ctx.now()
        counts = self._join.counts
        ctx.set_gauge("feedback_quarantined", self._bursts.num_held)
        ctx.set_gauge("requests_open", self._join.num_open)
        ctx.set_gauge("samples_joined", counts.num_joined)
        ctx.set_gauge("samples_revised", counts.num_revised)
        ctx.set_gauge("requests_defaulted", counts.num_defaulted)
        ctx.set_gauge("requests_dropped", counts.num_dropped)
        ctx.set_gauge("requests_without_consent", counts.num_without_consent)
        ctx.set_gauge("feedback_left_out", counts.num_left_out)
        return effects

    def _due(self, now: float) -> list[Event]:
        """Return the samples and fates that follow from what was read by `now`."""
        effects: list[Event] = [
            msgspec.structs.replace(sample, weight=sample.weight * self._trust.weight(sample))
            for sample in self._join.due(now)
            if not self._bursts.holds(sample)  # The join offers it again within a minute.
        ]
        return [*effects, *self._join.left_out()]

    def _pass_time(self, ctx: Context) -> Effects:
        """While catching up, do what ticks did between the event before and this one."""
        if ctx.is_caught_up or ctx.stored_at < self._ticked_at + self.tick_s:
            return ()
        self._ticked_at = ctx.stored_at
        return self._found(self._due(ctx.stored_at), ctx)

    def _found(self, events: Iterable[Event], ctx: Context) -> Effects:
        """Return what may be published now; while catching up the log may have it further on."""
        if ctx.is_caught_up:
            return list(events)
        for event in events:
            self._held[_name(event)] = event
        num_above = max(0, len(self._held) - NUM_HELD_MAX)
        return [self._held.popitem(last=False)[1] for _ in range(num_above)]

    def _lacking(self) -> list[Event]:
        """Return what was found while catching up and the log lacks.

        Not the samples of sessions that are still known: those are looked at again.
        """
        held = list(self._held.values())
        self._held.clear()
        self._join.offer_again(each for each in held if isinstance(each, LiveSampleJoined))
        return [
            each
            for each in held
            if not (isinstance(each, LiveSampleJoined) and self._join.knows(each.sample_id))
        ]


def _name(event: Event) -> str:
    # Of a sample the newest revision: another one replaces it.
    key = event.sample_id if isinstance(event, LiveSampleJoined) else event.key()
    return f"{type(event).__name__}.{key}"
