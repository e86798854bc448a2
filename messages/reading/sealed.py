"""What users wrote and were told, sealed under keys of theirs; the log has no other form of it."""

from typing import Protocol

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


class Opener(Protocol):
    """Opens what was sealed; `actors.runtime.vault` is it."""

    async def open(self, sealed: Sealed, what: str) -> bytes:
        """Return the bytes.

        Args:
            sealed: from an event.
            what: the event's key: no content passes for another event's.

        Raises:
            ErasedError: The key is gone, and the content with it.
            CodecError: It was sealed for something else, or changed since.
            StoreUnreachableError: The store of keys did not answer.

        """
        ...

    def forget(self, owner: str) -> None:
        """Drop the copy of an owner's key in memory."""
        ...
