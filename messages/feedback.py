"""Live requests, users' feedback on them, and the samples they become."""

from typing import ClassVar

from penstock.messages.base import Event, Stream
from penstock.messages.rollout import Turn


class InferenceRecorded(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join. One answered request, token by token."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    request_id: str
    session_id: str
    key_id: str
    """Which bearer key (never the key itself)."""
    training_consent: bool
    variant: str
    propensity: float
    """Probability with which routing chose this variant."""
    turn: Turn
    policy_version: int
    replica: str

    def key(self) -> str:
        """One per request."""
        return self.request_id


class FeedbackReceived(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join. May arrive before the record, late, or twice."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    feedback_id: str
    request_id: str
    name: str
    """thumbs, accept, reject, tests_passed ..."""
    value: float
    key_id: str
    weight: float = 1.0
    comment: str = ""
    correction: str = ""
    source: str = ""
    occurred_at: str = ""
    amends: str = ""
    """Feedback id that this one replaces; the newest amendment counts."""

    def key(self) -> str:
        """One per feedback id."""
        return self.feedback_id


class FeedbackRetracted(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join: forget it; a sample not yet trained leaves the pool."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    feedback_id: str
    request_id: str

    def key(self) -> str:
        """One per feedback id."""
        return self.feedback_id


class LiveSampleJoined(Event, frozen=True, kw_only=True):
    """Feedback join -> trainer: a request with its reward."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    request_id: str
    feedback_ids: list[str]
    reward: float
    variant: str
    propensity: float
    policy_version: int
    turn: Turn

    def key(self) -> str:
        """One per request."""
        return self.request_id
