"""What several gateways of one run hold together: limits of keys, and replies to retried requests.

In memory, for minutes (`Stream.GATEWAY`), and changed by compare-and-swap.
"""

from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.reading.sealed import Sealed
from penstock.messages.settings import Finite


class RequestsOpen(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one key in progress at one gateway."""

    num: int
    at: Finite
    """Unix seconds of the last change."""


class LimitsChanged(Event, frozen=True, kw_only=True):
    """Gateway -> gateways: what a key has left."""

    stream: ClassVar[Stream] = Stream.GATEWAY
    name: str
    """The key's id; for its feedback, `<key id>.feedback`."""
    at: Finite
    """Unix seconds of the levels."""
    levels: dict[str, Finite] = {}
    """Bucket -> what may be spent; a bucket that is not listed is full."""
    open: dict[str, RequestsOpen] = {}
    """Gateway -> its requests in progress."""

    def key(self) -> str:
        """Name the account; its newest event counts."""
        return self.name


class ReplyKept(Event, frozen=True, kw_only=True):
    """Gateway -> gateways: a request with an `Idempotency-Key`, and its reply once there is one."""

    stream: ClassVar[Stream] = Stream.GATEWAY
    name: str
    """Digest of tenant and `Idempotency-Key`."""
    request_digest: str
    """Of path and body: another request under the same key is refused."""
    holder: str
    """The gateway that answers it, while it has no reply; "" where it gave up."""
    at: Finite
    """Unix seconds of this state."""
    reply: Sealed | None = None
    """Body of the reply, under its user's content key; None while there is none."""
    headers: dict[str, str] = {}
    """Headers of the reply, its content type among them."""

    def key(self) -> str:
        """One per tenant and `Idempotency-Key`."""
        return self.name
