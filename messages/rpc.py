"""Errors and acknowledgements of request-reply services."""

import asyncio
from enum import StrEnum

from penstock.messages.base import Message
from penstock.messages.errors import NotFoundError, QueueFullError, RemoteCallError


class RemoteErrorKind(StrEnum):
    """Kind of a remote failure, which determines how the client handles it."""

    INVALID = "invalid"
    """The request is invalid; retrying it fails again."""
    TOO_LONG = "too_long"
    """The context exceeds the engine's capacity; the text gives both lengths."""
    CHARGED = "charged"
    """The server failed or died while handling this request."""
    QUARANTINED = "quarantined"
    """The request was charged twice; nobody retries it."""
    BUSY = "busy"
    FAILED = "failed"
    GONE = "gone"


class RemoteError(Message, frozen=True, kw_only=True):
    """Any server -> its client: the request failed."""

    kind: RemoteErrorKind
    error: str


def to_remote(error: Exception) -> RemoteError:
    """Convert an error of a request handler to a reply whose kind says how clients handle it."""
    # A server that relays a request passes on the kind of failure that its own server reported.
    if isinstance(error, RemoteCallError):
        return RemoteError(kind=RemoteErrorKind(error.kind), error=error.text)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, NotFoundError):
        return RemoteError(kind=RemoteErrorKind.GONE, error=text)
    if isinstance(error, ValueError):
        return RemoteError(kind=RemoteErrorKind.INVALID, error=text)
    if isinstance(error, QueueFullError | asyncio.QueueFull):
        return RemoteError(kind=RemoteErrorKind.BUSY, error=text)
    return RemoteError(kind=RemoteErrorKind.FAILED, error=text)


class Ack(Message, frozen=True, kw_only=True):
    """Any server -> its client: the request is done, or still in progress."""
