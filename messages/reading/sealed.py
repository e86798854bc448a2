"""What users wrote and were told, sealed under keys of theirs; the log has no other form of it."""

from collections.abc import Awaitable, Callable

import msgspec

from penstock.messages.base import Claim, Part
from penstock.messages.rollout import StoredTurn, TurnSummary


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that can be read as long as their key is kept."""

    owner: str
    """`<tenant>/<user>`, whose key it is."""
    key_id: str
    """Which of the owner's keys: who comes back after an erasure has another one."""
    data: bytes


class SealedTurn(Part, frozen=True, kw_only=True):
    """A `Turn` that only its user's key opens."""

    summary: TurnSummary
    sealed: Sealed

    def stored(self, claim: Claim) -> StoredTurn:
        """Return its claim, with its summary."""
        return StoredTurn(
            object_key=claim.object_key,
            num_bytes=claim.num_bytes,
            blake3=claim.blake3,
            summary=self.summary,
        )


class FeedbackContent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a user wrote with a piece of feedback."""

    comment: str = ""
    correction: str = ""
    correction_ids: list[int] = []
    """The correction as the policy would have had to sample it, end token included: by the format
    that rendered the request."""


Open = Callable[[Sealed, str], Awaitable[bytes]]
"""(what was sealed, the key of its event) -> the bytes: `Vault.open`. The key keeps one event's
content from passing for another's. Raises `ErasedError` where the user's key was erased,
`CodecError` where the content is another event's or has changed, `StoreUnreachableError` where the
store of keys does not answer."""
