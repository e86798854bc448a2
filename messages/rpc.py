"""Request and reply: what every service answers."""

import asyncio
from enum import StrEnum

from penstock.messages.base import Message
from penstock.messages.errors import NotFoundError, QueueFullError, RemoteCallError


class RemoteErrorKind(StrEnum):
    """How a remote failure is to be treated."""

    INVALID = "invalid"
    """Wrong in itself: another attempt is refused alike."""
    TOO_LONG = "too_long"
    """A context beyond what the engine holds; the text has both lengths."""
    CHARGED = "charged"
    """The server failed at this very request, or ended under it."""
    QUARANTINED = "quarantined"
    """It was charged twice, and is not tried again by anyone."""
    BUSY = "busy"
    FAILED = "failed"
    GONE = "gone"


class RemoteError(Message, frozen=True, kw_only=True):
    """Any server -> its client: the request failed, and how."""

    kind: RemoteErrorKind
    error: str


def to_remote(error: Exception) -> RemoteError:
    """Return the error of a request handler as its client is to treat it."""
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
    """Done, nothing to return."""
