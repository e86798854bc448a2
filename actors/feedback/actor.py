"""The feedback join as an actor: FEEDBACK in, live samples out."""

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
    FeedbackReceived,
    FeedbackRetracted,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.signals.quarantine import QuarantineReleased


class FeedbackJoiner(Actor):
    """Joins requests with their feedback; its state follows from the log."""

    role = "feedback"
    tick_s = 0.5
    follows: ClassVar[tuple[type[Event], ...]] = (
        InferenceRecorded,
        InferenceCounted,
        FeedbackReceived,
        FeedbackRetracted,
        LiveSampleJoined,
        ErasureRequested,
        ConsentWithdrawn,
        QuarantineReleased,
    )

    def __init__(self, config: JoinConfig) -> None:
        """Start with nothing open."""
        self._join = FeedbackJoin(config)
        self._preferences = Preferences(config)
        self._bursts = Bursts(config.burst)
        self._trust = Trust(config)

    async def on_inference_recorded(self, event: InferenceRecorded, ctx: Context) -> Effects:
        """Open the request."""
        self._join.add_record(event, ctx.now())
        return self._bursts.admit(self._preferences.add_record(event))

    async def on_inference_counted(self, event: InferenceCounted, ctx: Context) -> Effects:
        """Know that nothing may be made of the request."""
        self._join.add_counted(event.request_id, event.tenant)
        return ()

    async def on_feedback_received(self, event: FeedbackReceived, ctx: Context) -> Effects:
        """Note the signal; hold it if it is one of a burst."""
        self._trust.add(event)
        quarantined = self._bursts.add(event, ctx.stored_at)
        self._join.add_feedback(event, ctx.now())
        found: list[Event] = [*self._bursts.admit(self._preferences.add_feedback(event))]
        return [*found, quarantined] if quarantined else found

    async def on_quarantine_released(self, event: QuarantineReleased, ctx: Context) -> Effects:
        """Let the feedback of a burst count."""
        return self._bursts.release(event)

    async def on_feedback_retracted(self, event: FeedbackRetracted, ctx: Context) -> Effects:
        """Forget the signal."""
        self._join.retract(event, ctx.now())
        return ()

    async def on_live_sample_joined(self, event: LiveSampleJoined, ctx: Context) -> Effects:
        """See what the log has, of this join or of the one before a restart."""
        self._join.note_joined(event, ctx.now())
        return ()

    async def on_erasure_requested(self, event: ErasureRequested, ctx: Context) -> Effects:
        """Make no more samples of a user's requests."""
        self._join.erase(event)
        return ()

    async def on_consent_withdrawn(self, event: ConsentWithdrawn, ctx: Context) -> Effects:
        """Make no more of what was recorded before."""
        self._join.withdraw(event)
        self._preferences.withdraw(event)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Publish what is due; the log keeps one of each revision whatever happens."""
        counts = self._join.counts
        effects: list[Event] = [
            msgspec.structs.replace(sample, weight=sample.weight * self._trust.weight(sample))
            for sample in self._join.due(ctx.now())
            if not self._bursts.holds(sample)  # The join offers it again within a minute.
        ]
        effects += self._join.left_out()
        ctx.set_gauge("feedback_quarantined", self._bursts.num_held)
        ctx.set_gauge("requests_open", self._join.num_open)
        ctx.set_gauge("samples_joined", counts.num_joined)
        ctx.set_gauge("samples_revised", counts.num_revised)
        ctx.set_gauge("requests_defaulted", counts.num_defaulted)
        ctx.set_gauge("requests_dropped", counts.num_dropped)
        ctx.set_gauge("requests_without_consent", counts.num_without_consent)
        ctx.set_gauge("feedback_left_out", counts.num_left_out)
        return effects
