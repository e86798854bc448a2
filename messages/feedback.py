"""Live requests, users' feedback on them, and the samples they become."""

from enum import StrEnum
from typing import ClassVar

from penstock.messages.base import Event, Stream
from penstock.messages.gates import ReplyFacts
from penstock.messages.reading.sealed import Sealed, SealedTurn
from penstock.messages.rollout import StopReason, StoredTurn, TurnSummary
from penstock.messages.settings import Finite, NonNegativeFloat, NonNegativeInt, UnitInterval


def feedback_key(tenant: str, feedback_id: str) -> str:
    """Return the log's key of a piece of feedback; a tenant has no dot, so no two meet."""
    return f"{tenant}.{feedback_id}" if tenant else feedback_id


def owner_of(tenant: str, user: str) -> str:
    """Return whose key seals a user's content (`Sealed.owner`)."""
    return f"{tenant}/{user}"


class InferenceCounted(Event, frozen=True, kw_only=True):
    """Gateway -> monitor, gates. One answered request that may not be stored: counts alone."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    request_id: str
    key_id: str
    tenant: str
    variant: str
    propensity: UnitInterval
    channel: str = ""
    facts: ReplyFacts = ReplyFacts()
    """Without names of tools."""
    recorded_at: NonNegativeFloat = 0.0
    """Unix seconds, on the gateway's clock."""
    turn: TurnSummary
    stop_reason: StopReason
    policy_version: int
    replica: str

    def key(self) -> str:
        """One per request."""
        return self.request_id


class InferenceRecorded(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join. One answered request, and the only copy of its turn."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    request_id: str
    session_id: str
    chain: str = ""
    """Requests of a session that follow one another, each context extending the one before or
    beginning with a summary of it: the id of the first of them."""
    key_id: str
    """Which bearer key (never the key itself)."""
    tenant: str = ""
    """Whose key it is."""
    user: str = ""
    """Pseudonym of the end user."""
    training_consent: bool
    variant: str
    propensity: UnitInterval
    """Probability with which routing chose this variant."""
    channel: str = ""
    """Whose replicas were asked: the variant's, or those of the gateway where these were gone."""
    facts: ReplyFacts = ReplyFacts()
    recorded_at: NonNegativeFloat = 0.0
    """Unix seconds, on the gateway's clock."""
    turn: SealedTurn | StoredTurn
    """Sealed wherever it lies."""
    policy_version: int
    """Oldest that sampled one of its tokens; `EXTERNAL_VERSION` of an external session."""
    replica: str
    is_external: bool = False
    """A whole session that was sampled elsewhere and submitted when it was over: its tokens are the
    chat format's, and what came between its turns is in `Turn.forced`."""

    def key(self) -> str:
        """One per request."""
        return self.request_id


class FeedbackReceived(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join. May arrive before the record, late, or twice.

    It counts on requests of its own tenant, and a trusted key's on those of all.
    """

    stream: ClassVar[Stream] = Stream.SIGNALS
    feedback_id: str
    """Unique in its tenant."""
    request_id: str
    name: str
    """thumbs, accept, reject, tests_passed ..."""
    value: Finite
    key_id: str
    tenant: str = ""
    user: str = ""
    """Pseudonym of the end user who gave it."""
    weight: NonNegativeFloat = 1.0
    content: Sealed | None = None
    """`FeedbackContent`: what the user wrote; nothing without consent to storage."""
    source: str = ""
    occurred_at: str = ""
    is_trusted: bool = False
    """The key may judge requests of others (`KeySpec.is_trusted`), as the gateway knew it."""
    amends: str = ""
    """Feedback id that this one replaces; the newest amendment counts."""

    def key(self) -> str:
        """One per tenant and feedback id."""
        return feedback_key(self.tenant, self.feedback_id)


class FeedbackRetracted(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join: forget it; a sample not yet trained leaves the pool."""

    stream: ClassVar[Stream] = Stream.SIGNALS
    feedback_id: str
    request_id: str
    tenant: str = ""
    user: str = ""

    def key(self) -> str:
        """One per tenant and feedback id."""
        return feedback_key(self.tenant, self.feedback_id)


class LeftOutReason(StrEnum):
    """Why a piece of feedback is in no sample and will be in none."""

    NO_CONSENT = "no_consent"
    """Its request may not be trained."""
    UNKNOWN_REQUEST = "unknown_request"
    """Its request never came."""
    LATE = "late"
    """Its request was forgotten, or it was still too early to be believed by then."""
    NOT_ALLOWED = "not_allowed"
    """Its sender may not judge this request, or not with this signal."""
    UNDECLARED = "undeclared"
    """No such signal is declared any more."""
    CAPPED = "capped"
    """Its session has too much feedback, or its sample too many revisions."""
    ERASED = "erased"
    """The user whose request it is was erased."""


class FeedbackLeftOut(Event, frozen=True, kw_only=True):
    """Feedback join -> gateway: a piece of feedback that will never count."""

    stream: ClassVar[Stream] = Stream.SIGNALS
    feedback_id: str
    request_id: str
    tenant: str = ""
    user: str = ""
    reason: LeftOutReason

    def key(self) -> str:
        """One per piece of feedback."""
        return feedback_key(self.tenant, self.feedback_id)


class LiveSampleJoined(Event, frozen=True, kw_only=True):
    """Feedback join -> trainer: requests of a session with their reward; records have the turns.

    A later revision replaces the one before: the same turns, another reward.
    """

    stream: ClassVar[Stream] = Stream.FEEDBACK
    sample_id: str
    """Id of its first request."""
    revision: NonNegativeInt = 0
    request_ids: list[str]
    """In order; a request without a session is alone."""
    turns: list[TurnSummary]
    """One per request."""
    reward: Finite
    """0 to 1: mean over the turns that signals reach."""
    turn_rewards: list[Finite] = []
    """What each turn's signals add to `reward`; empty: nothing."""
    unrated: list[NonNegativeInt] = []
    """Turns that no signal reaches: they get no advantage. All of them where every signal was taken
    back."""
    weight: NonNegativeFloat = 1.0
    """Of the sample in its batch."""
    session_id: str = ""
    tenant: str = ""
    user: str = ""
    """Pseudonym of the tenant's user."""
    feedback_ids: list[str]
    """Log keys (`feedback_key`) of what counts, each of the first where it was amended."""
    variant: str
    propensity: UnitInterval
    policy_version: int
    """Oldest that sampled one of its tokens."""
    evidence: list[str] = []
    """Per turn, the request whose context holds what came next (tool results, the user's next
    message); empty where none came yet. For judges."""

    def key(self) -> str:
        """One per sample and revision."""
        return f"{self.sample_id}.{self.revision}"


class ErasureRequested(Event, frozen=True, kw_only=True):
    """`penstock erase` -> join, trainer, gateways: use this user's content no more."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    tenant: str
    user: str
    key_id: str
    """Which of the user's content keys is to go."""

    def key(self) -> str:
        """One per content key."""
        return erasure_key(self)


class ErasurePrepared(Event, frozen=True, kw_only=True):
    """Trainer -> `penstock erase`: no step that is yet to be taken, or taken again, needs it."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    tenant: str
    user: str
    key_id: str

    def key(self) -> str:
        """One per content key."""
        return erasure_key(self)


class UserErased(Event, frozen=True, kw_only=True):
    """`penstock erase` -> everyone: the content key is gone, and the user's content with it."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    tenant: str
    user: str
    key_id: str
    step_last: NonNegativeInt = 0
    """Newest step that trained the user's samples: weights keep what they learned; 0 for none."""

    def key(self) -> str:
        """One per content key."""
        return erasure_key(self)


def erasure_key(event: ErasureRequested | ErasurePrepared | UserErased) -> str:
    """Return the log's key of an erasure."""
    return f"{event.tenant}.{event.user}.{event.key_id}"
