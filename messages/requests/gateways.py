"""State shared by the gateways of a run: rate limits by key, and replies to retried requests.

It is kept in memory for minutes (`Stream.GATEWAY`) and changed by compare-and-swap.
"""

from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.reading.sealed import Sealed
from penstock.messages.settings import Finite


class RequestsOpen(msgspec.Struct, frozen=True, kw_only=True):
    """Number of requests of one key in progress at one gateway."""

    num: int
    at: Finite
    """Time of the last change in Unix seconds."""


class LimitsChanged(Event, frozen=True, kw_only=True):
    """Gateway -> gateways: the remaining allowance of a key."""

    stream: ClassVar[Stream] = Stream.GATEWAY
    keyed_by: ClassVar[tuple[str, ...]] = ("name",)
    name: str
    """Account: the id of the key, or `<key id>.feedback` for its feedback."""
    at: Finite
    """Time of the levels in Unix seconds."""
    levels: dict[str, Finite] = {}
    """Bucket -> remaining tokens; a bucket that is not listed is full."""
    open: dict[str, RequestsOpen] = {}
    """Gateway -> requests of the key in progress there."""


class ReplyKept(Event, frozen=True, kw_only=True):
    """Gateway -> gateways: a request with an `Idempotency-Key`, and later its reply."""

    stream: ClassVar[Stream] = Stream.GATEWAY
    keyed_by: ClassVar[tuple[str, ...]] = ("name",)
    name: str
    """Digest of tenant and `Idempotency-Key`."""
    request_digest: str
    """Digest of path and body; a different request under the same key is refused."""
    holder: str
    """Gateway that is answering the request; empty once it has given up."""
    at: Finite
    """Time of this state in Unix seconds."""
    reply: Sealed | None = None
    """Body of the reply, sealed with the user's content key; None until there is a reply."""
    headers: dict[str, str] = {}
    """Headers of the reply, including its content type."""
