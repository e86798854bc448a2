"""Errors of a request handler on the wire, and back at the asker."""

import asyncio

from penstock.messages.errors import NotFoundError, QueueFullError, RemoteCallError
from penstock.messages.rpc import RemoteError, RemoteErrorKind


def to_remote(error: Exception) -> RemoteError:
    """Say how the failure is to be treated."""
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


def to_error(remote: RemoteError) -> RemoteCallError:
    """Return what the asker raises."""
    return RemoteCallError(remote.kind, remote.error)
