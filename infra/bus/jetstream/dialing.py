"""The wait for a connection, and whether a failure on the way is final."""

import asyncio
import logging
import ssl
from typing import Any

import nats.errors
from nats.aio.client import Client

from penstock.infra.bus.jetstream.access import Access, PlainServerError
from penstock.messages.errors import PenstockError

log = logging.getLogger(__name__)

_NUM_CANCELS_MAX = 100
_REFUSALS = ("authorization violation", "authentication expired")
"""Not "authentication timeout": a busy machine was slow to send them, and tries again."""


class Dialing:
    """The failures of one client; the client itself would try refused credentials for ever."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._newest: Exception | None = None

    def note(self, error: Exception) -> None:
        """Take a failure; permission denials arrive here and nowhere else."""
        self._newest = error
        text = str(error)
        if any(word in text.lower() for word in _REFUSALS):
            self._refuse(PermissionError(f"it refuses our credentials: {text}"))
        elif isinstance(error, ssl.SSLError | PlainServerError):
            self._refuse(error)
        elif not isinstance(error, OSError):  # An OSError is one more failed reconnect.
            log.error("NATS: %s: %s", type(error).__name__, error)

    def _refuse(self, error: Exception) -> None:
        if not self._refused.done():
            self._refused.set_exception(error)
            self._refused.exception()  # Read here, too: after the start nobody waits for it.

    def refusal(self, error: Exception | None) -> PenstockError:
        """Return the error of a client that gave up for good."""
        text = str(error or self._newest or "no reason given")
        return self._access.failure(PermissionError(f"it ended the connection: {text}"))

    async def wait(self, connecting: asyncio.Task[Any], within_s: float) -> None:
        """Wait until the client is connected.

        Raises:
            BusError: An embedded server is not there, or refused us.
            ConfigError: The same of servers that `[bus]` names; the text names the field.

        """
        try:
            await asyncio.wait(
                [connecting, self._refused],
                timeout=within_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._refused.done():
                self._refused.result()
            if not connecting.done():
                raise self._newest or TimeoutError(f"no answer within {within_s} s")
            connecting.result()
        except (TimeoutError, OSError, nats.errors.Error) as error:
            raise self._access.failure(error) from error
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)


async def end_reconnecting(client: Client, wait_s: float) -> None:
    """Cancel until it takes: the client does so once, then its task would keep us from exiting.

    `asyncio.wait_for` loses a cancellation that meets a refused connection.
    """
    task = client._reconnection_task  # pyright: ignore[reportPrivateUsage]
    for _ in range(_NUM_CANCELS_MAX):
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.wait([task], timeout=wait_s)
