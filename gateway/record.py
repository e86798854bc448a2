"""Records of answered requests: the encrypted turn or only counts, as consent allows."""

from collections.abc import Callable, Collection

import msgspec

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, UnrenderableError
from penstock.actors.policy.tokenizer import UntokenizableError
from penstock.actors.runtime.vault import Vault
from penstock.gateway.arms import Route
from penstock.gateway.errors import invalid
from penstock.gateway.identity import Pseudonyms
from penstock.gateway.keys import KeySpec
from penstock.messages.errors import ErasedError
from penstock.messages.feedback import (
    FeedbackReceived,
    InferenceCounted,
    InferenceRecorded,
    owner_of,
)
from penstock.messages.gates import ReplyFacts
from penstock.messages.reading.sealed import FeedbackContent, Sealed, SealedTurn
from penstock.messages.rollout import StopReason, Turn


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """Permissions for the content of one request and the feedback on it."""

    storage: bool
    training: bool


def consent_of(key: KeySpec, store: bool, metadata: dict[str, str]) -> Consent:
    """Return the consents of the key, less those that the request withdraws.

    Args:
        key: Key of the request; a request cannot consent to more than its key.
        store: Field `store` of the request; False allows counts only.
        metadata: Metadata of the request; `storage_consent` and `training_consent` may be "false".

    Raises:
        ApiError: 400, one of these two is neither "true" nor "false".

    """
    storage = key.storage_consent and store and _agrees(metadata, "storage_consent")
    training = _agrees(metadata, "training_consent") and key.training_consent and storage
    return Consent(storage=storage, training=training)


def _agrees(metadata: dict[str, str], name: str) -> bool:
    value = metadata.get(name, "true")
    # Any other spelling of "no" must not count as a yes.
    if value not in {"true", "false"}:
        raise invalid('expected "true" or "false"', f"metadata.{name}")
    return value == "true"


class Requester(msgspec.Struct, frozen=True, kw_only=True):
    """The client behind a request: key, user and consent."""

    key: KeySpec
    user: str
    """Pseudonym of the end user."""
    consent: Consent
    erasures: int = 0
    """Erasures of the user before the request; what came before one is not stored after it."""


class AnsweredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An answered request, before it goes to the log."""

    request_id: str
    session_id: str
    chain: str
    """Id of the chain of turns that the request continues; see `InferenceRecorded.chain`."""
    client: Requester
    route: Route
    channel: str
    """Channel of the replicas that answered."""
    facts: ReplyFacts
    at: float
    """Time of the answer in Unix seconds."""
    turn: Turn
    policy_version: int
    replica: str
    is_external: bool = False
    """Whether another service sampled the turn."""


class RecordTerms:
    """What may be stored of a record now, whatever was agreed when its request came."""

    def __init__(
        self,
        key_of: Callable[[str], KeySpec | None],
        pseudonyms: Pseudonyms,
        public_tools: Collection[str],
    ) -> None:
        """Start.

        Args:
            key_of: Returns the key of an id, None if it is revoked.
            pseudonyms: Of tools.
            public_tools: Names of tools that say nothing of their user; the log has them as they
                are.

        """
        self._key_of = key_of
        self._pseudonyms = pseudonyms
        self._public_tools = public_tools

    def pseudonymous(self, answered: AnsweredRequest) -> AnsweredRequest:
        """Return a request with pseudonyms for the tools that its client invented."""
        tools = answered.facts.tools
        if tools.keys() <= set(self._public_tools):
            return answered
        tenant = answered.client.key.tenant
        named = {
            name if name in self._public_tools else self._pseudonyms.tool(tenant, name): count
            for name, count in tools.items()
        }
        facts = msgspec.structs.replace(answered.facts, tools=named)
        return msgspec.structs.replace(answered, facts=facts)

    def permitted(self, record: InferenceRecorded) -> InferenceRecorded | InferenceCounted:
        """Return a record without what its key does not agree to any more."""
        key = self._key_of(record.key_id)
        if key is None or not key.training_consent:
            record = msgspec.structs.replace(record, training_consent=False)
        if key is not None and not key.storage_consent:
            return _counts_of(record)
        return record


def _counts_of(record: InferenceRecorded) -> InferenceCounted:
    turn = record.turn
    return InferenceCounted(
        request_id=record.request_id,
        key_id=record.key_id,
        tenant=record.tenant,
        variant=record.variant,
        propensity=record.propensity,
        channel=record.channel,
        facts=msgspec.structs.replace(record.facts, tools={}),
        recorded_at=record.recorded_at,
        turn=turn.summary,
        stop_reason=StopReason.STOP,
        policy_version=record.policy_version,
        replica=record.replica,
    )


async def record_of(
    answered: AnsweredRequest, vault: Vault
) -> InferenceRecorded | InferenceCounted:
    """Return the event for an answered request; only counts if its user was erased meanwhile.

    Raises:
        PenstockError: The encryption key of the user is not available now.

    """
    client = answered.client
    if not client.consent.storage:
        return _counted(answered)
    data = msgspec.msgpack.encode(answered.turn)
    owner = owner_of(client.key.tenant, client.user)
    try:
        sealed = await vault.seal(owner, answered.request_id, data, since=client.erasures)
    except ErasedError:
        return _counted(answered)
    return _recorded(answered, sealed)


def record_offline(answered: AnsweredRequest, vault: Vault) -> InferenceRecorded | InferenceCounted:
    """Return the event while users' encryption keys are unavailable; `resealed` completes it."""
    if not answered.client.consent.storage:
        return _counted(answered)
    data = msgspec.msgpack.encode(answered.turn)
    # Encrypted with the service's own key: nothing waits on disk in plain text.
    since = answered.client.erasures
    return _recorded(answered, vault.seal_for_later(answered.request_id, data, since))


def _recorded(answered: AnsweredRequest, sealed: Sealed) -> InferenceRecorded:
    client, route = answered.client, answered.route
    return InferenceRecorded(
        request_id=answered.request_id,
        session_id=answered.session_id,
        chain=answered.chain,
        key_id=client.key.key_id,
        tenant=client.key.tenant,
        user=client.user,
        training_consent=client.consent.training,
        variant=route.variant,
        propensity=route.propensity,
        channel=answered.channel,
        facts=answered.facts,
        recorded_at=answered.at,
        turn=SealedTurn(summary=answered.turn.summary, sealed=sealed),
        policy_version=answered.policy_version,
        replica=answered.replica,
        is_external=answered.is_external,
    )


async def resealed(record: InferenceRecorded, vault: Vault) -> InferenceRecorded:
    """Return a record whose turn is encrypted with the key of its user.

    Raises:
        ErasedError: The user was erased since the request.
        StoreUnreachableError: The key is still not available.

    """
    turn = record.turn
    if not isinstance(turn, SealedTurn) or not vault.is_for_later(turn.sealed):
        return record
    data = await vault.open(turn.sealed, record.request_id)
    owner, since = owner_of(record.tenant, record.user), vault.since(turn.sealed)
    sealed = await vault.seal(owner, record.request_id, data, since=since)
    return msgspec.structs.replace(record, turn=msgspec.structs.replace(turn, sealed=sealed))


def with_correction_ids(content: FeedbackContent, chat: ChatFormat) -> FeedbackContent:
    """Return the texts of a user with the token ids of the correction, which training needs.

    A correction that the chat format cannot render gets no ids: it is stored but not trained.
    """
    if not content.correction:
        return msgspec.structs.replace(content, correction_ids=[])
    try:
        ids = chat.render_turn(content.correction, (), OfferedTools())
    except (UnrenderableError, UntokenizableError):
        ids = []
    return msgspec.structs.replace(content, correction_ids=ids)


async def sealed_content(
    vault: Vault, event: FeedbackReceived, content: FeedbackContent, since: int
) -> Sealed | None:
    """Return the texts of a user, encrypted; None if there are none.

    Raises:
        ErasedError: The user had fewer erasures, `since`, when the texts came.

    """
    if content == FeedbackContent():
        return None
    owner = owner_of(event.tenant, event.user)
    return await vault.seal(owner, event.key(), msgspec.msgpack.encode(content), since=since)


def _counted(answered: AnsweredRequest) -> InferenceCounted:
    client, route = answered.client, answered.route
    return InferenceCounted(
        request_id=answered.request_id,
        key_id=client.key.key_id,
        tenant=client.key.tenant,
        variant=route.variant,
        propensity=route.propensity,
        channel=answered.channel,
        # Names of tools are the client's words: without storage consent none are kept.
        facts=msgspec.structs.replace(answered.facts, tools={}),
        recorded_at=answered.at,
        turn=answered.turn.summary,
        stop_reason=answered.turn.stop_reason,
        policy_version=answered.policy_version,
        replica=answered.replica,
    )
