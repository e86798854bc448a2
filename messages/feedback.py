"""Live requests, users' feedback on them, and the training samples made from both."""

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar

from penstock.messages.base import Event, Stream
from penstock.messages.gates import ReplyFacts
from penstock.messages.reading.sealed import Sealed, SealedTurn
from penstock.messages.rollout import StopReason, StoredTurn, TurnSummary
from penstock.messages.settings import Finite, NonNegativeFloat, NonNegativeInt, UnitInterval


def feedback_key(tenant: str, feedback_id: str) -> str:
    """Return the event key of a piece of feedback; keys are unique because tenants have no dot."""
    return f"{tenant}.{feedback_id}" if tenant else feedback_id


def tenant_of(feedback_key: str) -> str:
    """Return the tenant of an event key of feedback."""
    return feedback_key.partition(".")[0] if "." in feedback_key else ""


def owner_of(tenant: str, user: str) -> str:
    """Return the owner of the key that seals a user's content (`Sealed.owner`)."""
    return f"{tenant}/{user}"


class InferenceCounted(Event, frozen=True, kw_only=True):
    """Gateway -> monitor, gates: counts of a request whose content may not be stored."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    keyed_by: ClassVar[tuple[str, ...]] = ("request_id",)
    request_id: str
    key_id: str
    tenant: str
    variant: str
    propensity: UnitInterval
    channel: str = ""
    facts: ReplyFacts = ReplyFacts()
    """Counts of the reply, without names of tools."""
    recorded_at: NonNegativeFloat = 0.0
    """Time of the reply in Unix seconds, on the gateway's clock."""
    turn: TurnSummary
    stop_reason: StopReason
    policy_version: int
    replica: str


class InferenceRecorded(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join: an answered request, with the only copy of its turn."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    keyed_by: ClassVar[tuple[str, ...]] = ("request_id",)
    request_id: str
    session_id: str
    chain: str = ""
    """Id of the first request of the chain that this one continues: within a session, requests
    whose context extends the previous one or begins with a summary of it."""
    key_id: str
    """Id of the bearer key, never the key itself."""
    tenant: str = ""
    """Tenant that owns the bearer key."""
    user: str = ""
    """Pseudonym of the end user who sent the request."""
    training_consent: bool
    variant: str
    propensity: UnitInterval
    """Probability with which routing chose this variant."""
    channel: str = ""
    """Channel that answered: the variant's, or the gateway's default if its replicas were gone."""
    facts: ReplyFacts = ReplyFacts()
    recorded_at: NonNegativeFloat = 0.0
    """Time of the reply in Unix seconds, on the gateway's clock."""
    turn: SealedTurn | StoredTurn
    """Turn, sealed both in the event and in the store."""
    policy_version: int
    """Oldest version that sampled one of the tokens; `EXTERNAL_VERSION` for external sessions."""
    replica: str
    is_external: bool = False
    """Whether this is a complete session sampled elsewhere and submitted afterwards; its tokens
    come from the chat format, and `Turn.forced` marks those between its turns."""


class FeedbackReceived(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join: feedback on a request.

    It may arrive before the request's record, late, or twice. It counts for requests of the same
    tenant; feedback sent with a trusted key counts for requests of any tenant.
    """

    stream: ClassVar[Stream] = Stream.SIGNALS
    feedback_id: str
    """Pseudonym of the id that the sender gave it, unique within the tenant."""
    request_id: str
    name: str
    """Name of the signal: thumbs, accept, reject, tests_passed ..."""
    value: Finite
    key_id: str
    tenant: str = ""
    user: str = ""
    """Pseudonym of the end user who gave the feedback."""
    weight: NonNegativeFloat = 1.0
    content: Sealed | None = None
    """Sealed `FeedbackContent`, the text that the user wrote; None without consent to storage."""
    source: str = ""
    """Only in events of earlier releases, as `occurred_at`: they are part of `content`."""
    occurred_at: str = ""
    is_trusted: bool = False
    """Whether the key was allowed to judge other tenants' requests (`KeySpec.is_trusted`)."""
    amends: str = ""
    """Id of the feedback that this one replaces; the newest amendment counts."""

    def key(self) -> str:
        """Return the key: one event per tenant and feedback id."""
        return feedback_key(self.tenant, self.feedback_id)


class FeedbackRetracted(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join: drop a piece of feedback, and its sample if not yet trained."""

    stream: ClassVar[Stream] = Stream.SIGNALS
    feedback_id: str
    request_id: str
    tenant: str = ""
    user: str = ""

    def key(self) -> str:
        """Return the key: one event per tenant and feedback id."""
        return feedback_key(self.tenant, self.feedback_id)


class LeftOutReason(StrEnum):
    """Why a piece of feedback will never be part of a sample."""

    NO_CONSENT = "no_consent"
    """There is no consent to train on the request."""
    UNKNOWN_REQUEST = "unknown_request"
    """The request never arrived."""
    LATE = "late"
    """The request had been dropped by then, or was dropped before the signal matured."""
    NOT_ALLOWED = "not_allowed"
    """The sender may not judge this request or may not use this signal."""
    UNDECLARED = "undeclared"
    """The signal is no longer declared."""
    CAPPED = "capped"
    """The session has too much feedback, or the sample has too many revisions."""
    ERASED = "erased"
    """The user who sent the request was erased."""


class FeedbackLeftOut(Event, frozen=True, kw_only=True):
    """Feedback join -> gateway: a piece of feedback will never count."""

    stream: ClassVar[Stream] = Stream.SIGNALS
    feedback_id: str
    request_id: str
    tenant: str = ""
    user: str = ""
    reason: LeftOutReason

    def key(self) -> str:
        """Return the key: one event per piece of feedback."""
        return feedback_key(self.tenant, self.feedback_id)


class LiveSampleJoined(Event, frozen=True, kw_only=True):
    """Feedback join -> trainer: requests of a session and their reward; the records hold the turns.

    A later revision replaces the previous one: the same turns with another reward.
    """

    stream: ClassVar[Stream] = Stream.FEEDBACK
    keyed_by: ClassVar[tuple[str, ...]] = ("sample_id", "revision")
    sample_id: str
    """Id of the sample's first request."""
    revision: NonNegativeInt = 0
    request_ids: list[str]
    """Ids of the requests, in order; a request without a session forms a sample by itself."""
    turns: list[TurnSummary]
    """Summary of each request's turn."""
    reward: Finite
    """Mean reward, from 0 to 1, over the turns that have signals."""
    turn_rewards: list[Finite] = []
    """Contribution of each turn's signals to `reward`; empty if there is none."""
    unrated: list[NonNegativeInt] = []
    """Indices of turns without a signal, which get no advantage; all turns if every signal was
    retracted."""
    weight: NonNegativeFloat = 1.0
    """Weight of the sample in its batch."""
    session_id: str = ""
    tenant: str = ""
    user: str = ""
    """Pseudonym of the tenant's user."""
    feedback_ids: list[str]
    """Keys (`feedback_key`) of the feedback that counts; for an amendment, that of the original."""
    variant: str
    propensity: UnitInterval
    policy_version: int
    """Oldest version that sampled one of the tokens."""
    key_ids: list[str] = []
    """Ids of the bearer keys that made the requests; empty in events of earlier releases."""
    recorded_at: NonNegativeFloat = 0.0
    """Time of the oldest request in Unix seconds, on the gateway's clock."""
    evidence: list[str] = []
    """For judges: for each turn, the request whose context holds what followed (tool results, the
    user's next message); empty if none has arrived yet."""


class ConsentWithdrawn(Event, frozen=True, kw_only=True):
    """Gateway -> feedback join, trainer: train nothing more that was recorded before."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    tenant: str
    key_id: str = ""
    """Key whose consent is withdrawn; empty: every key of the tenant."""
    at: NonNegativeFloat
    """Unix time in seconds up to which records count as withdrawn, on the gateway's clock."""
    stamp: str
    """Gateway, and version of its keys file."""

    def key(self) -> str:
        """Return the key: one event per key, gateway and version of the keys file."""
        return f"{self.tenant}.{self.key_id or '+all'}.{self.stamp}"

    def covers(self, tenant: str, key_ids: Sequence[str], recorded_at: float) -> bool:
        """Return whether a sample of these keys, unknown if there is none, must not be trained."""
        is_of = not (self.key_id and key_ids) or self.key_id in key_ids
        return tenant == self.tenant and is_of and recorded_at <= self.at


class ErasureRequested(Event, frozen=True, kw_only=True):
    """`penstock erase` -> feedback join, trainer, gateways: stop using this user's content."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    tenant: str
    user: str
    key_id: str
    """Id of the content key to erase."""

    def key(self) -> str:
        """Return the key: one event per content key."""
        return erasure_key(self)


class ErasurePrepared(Event, frozen=True, kw_only=True):
    """Trainer -> `penstock erase`: no step still to be taken or repeated needs the content."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    tenant: str
    user: str
    key_id: str

    def key(self) -> str:
        """Return the key: one event per content key."""
        return erasure_key(self)


class UserErased(Event, frozen=True, kw_only=True):
    """`penstock erase` -> everyone: the content key is erased, so the content is unreadable."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    tenant: str
    user: str
    key_id: str
    step_last: NonNegativeInt = 0
    """Newest step that trained on the user's samples, 0 if none; weights keep what they learned."""

    def key(self) -> str:
        """Return the key: one event per content key."""
        return erasure_key(self)


def erasure_key(event: ErasureRequested | ErasurePrepared | UserErased) -> str:
    """Return the event key of an erasure."""
    return f"{event.tenant}.{event.user}.{event.key_id}"
