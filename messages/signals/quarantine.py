"""Bursts of feedback, which are held until somebody looks at them."""

from typing import ClassVar

from penstock.messages.base import Event, Stream
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt


class FeedbackQuarantined(Event, frozen=True, kw_only=True):
    """Feedback join -> monitor, `penstock quarantine`: a user gives far more feedback than ever."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    tenant: str
    user: str
    """Who gave it."""
    window: NonNegativeInt
    """Which one, since the epoch."""
    began_at: NonNegativeFloat
    """Unix seconds."""
    ends_at: NonNegativeFloat = 0.0
    """Unix seconds, end of the window: what this user gives until then is held, too."""
    num_signals: NonNegativeInt
    """In the window so far."""
    usual: NonNegativeFloat
    """The most that this user gave in a window before."""

    def key(self) -> str:
        """One per user and window."""
        return f"{self.tenant}.{self.user}.{self.window}"


class QuarantineReleased(Event, frozen=True, kw_only=True):
    """Command line -> feedback join: the feedback of a burst counts after all."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    quarantine: str
    """Key of the `FeedbackQuarantined`."""

    def key(self) -> str:
        """One per quarantine."""
        return self.quarantine
