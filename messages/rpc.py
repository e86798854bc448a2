"""Errors and acknowledgements of request-reply services, and retries of failed operations."""

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Generator
from enum import StrEnum
from typing import TypeVar

import msgspec

from penstock.messages.base import Message
from penstock.messages.errors import NotFoundError, QueueFullError, RemoteCallError

R = TypeVar("R")


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


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on how often and for how long a failed operation is retried."""

    pause_s: float
    """Seconds before the second attempt."""
    pause_s_max: float = 0.0
    """Maximum pause in seconds, up to which it doubles after each attempt; 0 keeps it constant."""
    deadline_s: float = math.inf
    """Seconds after the first attempt beyond which no other starts; unbounded by default."""
    num_attempts_max: int = sys.maxsize
    """Maximum number of attempts, including the first."""

    def pauses(self) -> Generator[float]:
        """Yield the pause in seconds after each failed attempt but the last."""
        pause_s = self.pause_s
        for _ in range(self.num_attempts_max - 1):
            yield pause_s
            pause_s = max(self.pause_s, min(2 * pause_s, self.pause_s_max))


def _never(error: Exception) -> bool:
    return False


async def with_retries(  # noqa: PLR0913 - all but two have defaults
    operation: Callable[[], Awaitable[R]],
    policy: RetryPolicy,
    *,
    retry_on: tuple[type[Exception], ...],
    is_final: Callable[[Exception], bool] = _never,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    log: logging.Logger | None = None,
) -> R:
    """Await `operation()` until it succeeds; raise its last error once the policy gives up.

    Errors outside `retry_on`, errors that are `is_final`, and cancellation are raised at once. Time
    is the event loop's, so that simulations can use their own clock.
    """
    loop = asyncio.get_running_loop()
    give_up_at, pauses = loop.time() + policy.deadline_s, policy.pauses()
    while True:
        try:
            return await operation()
        except retry_on as error:
            pause_s = next(pauses, math.inf)
            if math.isinf(pause_s) or loop.time() + pause_s > give_up_at or is_final(error):
                raise
            if log is not None:
                log.warning("trying again: %s", error)
        await sleep(pause_s)
