"""What a correction or a clear judgment says for losses over preferences: names, and no content.

The request's record has the context and the reply, its feedback the correction; both are sealed
under their user's key, so that a pair ends with the key. Written only where the request may be
trained.
"""

from typing import ClassVar

from penstock.messages.base import Event, Stream
from penstock.messages.settings import FiniteNonNegative


class PreferencePair(Event, frozen=True, kw_only=True):
    """Feedback join -> export: a user wrote what the reply should have been."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    feedback: str
    """Log key of the feedback that holds the correction, which is preferred."""
    root: str
    """Log key of the first where it amends one: the newest counts."""
    request_id: str
    """Its record holds the context and the reply, which is not."""
    tenant: str
    user: str
    """Who asked."""
    policy_version: int
    """Oldest that sampled a token of the reply."""

    def key(self) -> str:
        """One per piece of feedback."""
        return self.feedback


class Label(Event, frozen=True, kw_only=True):
    """Feedback join -> export: a user judged a reply by itself, without another one beside it."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    feedback: str
    """Log key."""
    root: str
    """Log key of the first where it amends one: the newest counts."""
    request_id: str
    name: str
    """Of the signal."""
    is_desirable: bool
    weight: FiniteNonNegative
    """The signal's declared weight times the feedback's own."""
    tenant: str
    user: str
    """Who asked."""
    policy_version: int
    """Oldest that sampled a token of the reply."""

    def key(self) -> str:
        """One per piece of feedback."""
        return self.feedback
