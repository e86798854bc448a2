"""Users' content, encrypted with a key per user; the log holds it in no other form."""

from collections.abc import Awaitable, Callable

import msgspec

from penstock.messages.base import Claim, Part
from penstock.messages.rollout import StoredTurn, TurnSummary


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """Encrypted bytes, readable only until their key is erased."""

    owner: str
    """Owner of the key, `<tenant>/<user>`."""
    key_id: str
    """Id of the key; a user who returns after an erasure gets a new one."""
    data: bytes


class SealedTurn(Part, frozen=True, kw_only=True):
    """`Turn` that is encrypted with its user's key."""

    summary: TurnSummary
    sealed: Sealed

    def stored(self, claim: Claim) -> StoredTurn:
        """Return a claim that also holds the turn's summary."""
        # Accounting needs the token counts, and must not need the user's key.
        return StoredTurn(
            object_key=claim.object_key,
            num_bytes=claim.num_bytes,
            blake3=claim.blake3,
            summary=self.summary,
        )


class FeedbackContent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Text that a user wrote as feedback."""

    comment: str = ""
    correction: str = ""
    source: str = ""
    occurred_at: str = ""
    correction_ids: list[int] = []
    """Tokens of the correction as the policy would have sampled it, end token included, in the chat
    format that rendered the request."""


Open = Callable[[Sealed, str], Awaitable[bytes]]
"""Decrypts content, given the key of its event, so that one event's content cannot pass for
another's: `Vault.open`. Raises `ErasedError` if the user's key was erased, `CodecError` if the
content belongs to another event or was altered, `StoreUnreachableError` if the store of keys did
not answer."""
