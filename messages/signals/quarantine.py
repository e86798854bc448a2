"""Bursts of feedback, held back until a person reviews them."""

from typing import ClassVar

from penstock.messages.base import Event, Stream
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt


class FeedbackQuarantined(Event, frozen=True, kw_only=True):
    """Feedback join -> monitor, `penstock quarantine`: a user sent far more feedback than usual."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    keyed_by: ClassVar[tuple[str, ...]] = ("tenant", "user", "window")
    tenant: str
    user: str
    """Pseudonym of the user who sent it."""
    window: NonNegativeInt
    """Number of the time window since the Unix epoch."""
    began_at: NonNegativeFloat
    """Start of the burst in Unix seconds."""
    ends_at: NonNegativeFloat = 0.0
    """End of the window in Unix seconds, until which all feedback of the user is held."""
    num_signals: NonNegativeInt
    """Number of signals in the window so far."""
    usual: NonNegativeFloat
    """Largest number of signals that the user sent in any earlier window."""


class QuarantineReleased(Event, frozen=True, kw_only=True):
    """Command line -> feedback join: the feedback of a quarantined burst counts after all."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    keyed_by: ClassVar[tuple[str, ...]] = ("quarantine",)
    quarantine: str
    """Key of the `FeedbackQuarantined` event."""
