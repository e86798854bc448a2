"""A NATS connection that reconnects, and the errors that NATS and JetStream answer with.

All requests share one inbox subscription, and all pending requests fail when the connection
breaks. `Dialing` decides which failures to connect are final; the status and error
codes of JetStream become exceptions here.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.infra.bus.jetstream.access import Access, PlainServerError, TlsClient, as_access
from penstock.messages.errors import BusClosedError, BusError, DeadlineError, PenstockError
from penstock.messages.retries import RetryPolicy, with_retries

log = logging.getLogger(__name__)

_NUM_CANCELS_MAX = 100
_REFUSALS = ("authorization violation", "authentication expired")
"""Error texts that make a failure final.

"authentication timeout" is not one: a busy machine sent its credentials late and tries again."""


class Dialing:
    """Failures of one client; by itself, the client would retry refused credentials forever."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._newest: Exception | None = None

    def note(self, error: Exception) -> None:
        """Record a failure; permission denials arrive here and nowhere else."""
        self._newest = error
        text = str(error)
        if any(word in text.lower() for word in _REFUSALS):
            self._refuse(PermissionError(f"it refuses our credentials: {text}"))
        elif isinstance(error, ssl.SSLError | PlainServerError):
            self._refuse(error)
        # An OSError is one more failed reconnect, of which there are ten a second.
        elif not isinstance(error, OSError):
            log.error("NATS: %s: %s", type(error).__name__, error)

    def _refuse(self, error: Exception) -> None:
        if not self._refused.done():
            self._refused.set_exception(error)
            # Retrieve it: after the start nobody waits for it, and asyncio would complain.
            self._refused.exception()

    def refusal(self, error: Exception | None) -> PenstockError:
        """Return the error to raise once the client has given up for good."""
        text = str(error or self._newest or "no reason given")
        return self._access.failure(PermissionError(f"it ended the connection: {text}"))

    async def wait(self, connecting: asyncio.Task[Any], within_s: float) -> None:
        """Wait until the client is connected.

        Raises:
            BusError: The embedded server is not reachable, or refused the connection.
            ConfigError: The same for servers that `[bus]` names; the text names the field.

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
    """Cancel the reconnection task of a client until it ends.

    The client cancels only once; a task that survives keeps the process from exiting.
    """
    task = client._reconnection_task  # pyright: ignore[reportPrivateUsage]
    # `asyncio.wait_for` in the client loses a cancellation that meets a refused connection.
    for _ in range(_NUM_CANCELS_MAX):
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.wait([task], timeout=wait_s)


NO_RESPONDERS = "503"
WRONG_LAST_SEQUENCE = {10071, 10164}
NAME_IN_USE = 10058
NO_MESSAGE = 10037
_UNAVAILABLE = {
    10008: "JetStream is temporarily unavailable",
    10118: "the stream is offline",
    10119: "the consumer is offline",
    10158: "a message of this id is being stored",
    10163: "the last sequence of the subject is being determined",
}
"""Transient error codes, mostly of clusters; the texts only explain the codes."""
RETRY = RetryPolicy(pause_s=0.1)


def _new_inbox(access: Access) -> str:
    # The client's own knows the prefix only once it is connected.
    return f"{access.inbox}.{secrets.token_hex(11)}"


class ConnectionLostError(BusError):
    """The connection broke during a request, which may or may not have taken effect."""


class UnavailableError(ConnectionLostError):
    """JetStream is temporarily unavailable: no leader, or the same message is being stored."""


LOST = (ConnectionLostError, DeadlineError)
"""Errors after which an idempotent request may be sent again."""


class JetStreamError(BusError):
    """Refusal of a call by JetStream; `code` is its `err_code`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code

    def __str__(self) -> str:
        return f"JetStream error {self.args[0]}: {self.args[1]}"


def status(message: Msg) -> str:
    """Return the status code of a control message; empty for any other."""
    if message.data or not message.headers:
        return ""
    return message.headers.get("Status", "")


def check_answer(message: Msg, what: str) -> dict[str, Any]:
    """Decode the answer of JetStream to `what`.

    Raises:
        JetStreamError: JetStream refused the call.
        UnavailableError: JetStream cannot serve the call at the moment.

    """
    answer: dict[str, Any] = json.loads(message.data)
    if error := answer.get("error"):
        code, text = error.get("err_code", 0), f"{what}: {error.get('description', '')}"
        if code in _UNAVAILABLE:
            raise UnavailableError(f"JetStream error {code}: {text}")
        raise JetStreamError(code, text)
    return answer


CONNECT_S_MAX = 15.0
RECONNECT_WAIT_S = 0.1
PENDING_BYTES_MAX = 64 << 20
PING_S = 5
CLOSE_S_MAX = 10.0
API_ATTEMPT_S = 2.0
API_S_MAX = 30.0

OnReply = Callable[[Msg], None]


class NatsConnection:
    """Connection that reconnects by itself.

    Every request has its own reply subject under one subscription, so a late reply to an earlier
    attempt is never taken for the reply to a later one.
    """

    def __init__(self, client: Client, access: Access, inbox: str) -> None:
        self._client = client
        self.access = access
        self._inbox = inbox
        self._tokens = itertools.count()
        self._replies: dict[str, OnReply] = {}
        self._breaks: dict[int, Callable[[], None]] = {}
        self._is_up = asyncio.Event()
        self._is_up.set()
        self._restores: set[asyncio.Task[None]] = set()
        self.restore: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Coroutine function that runs after every reconnection."""
        self._dialing = Dialing(access)
        self.is_closed = False
        self._refusal: PenstockError | None = None
        """Error raised by every later call once the servers have ended the connection for good."""
        self.num_breaks = 0

    @classmethod
    async def connect(cls, where: str | Access, name: str) -> "NatsConnection":
        """Connect to a server.

        Args:
            where: Address of an embedded server, or the result of `open_access`.
            name: Name of the connection in the reports of the server.

        Raises:
            BusError: No embedded server answered within CONNECT_S_MAX, or it refused us.
            ConfigError: The same for servers that `[bus]` names; the text names the field.

        """
        access = as_access(where)
        client = TlsClient() if access.wants_tls else Client()
        connection = cls(client, access, _new_inbox(access))
        connecting = client.connect(
            access.servers,
            name=name,
            error_cb=connection._on_error,
            disconnected_cb=connection._on_break,
            closed_cb=connection._on_closed,
            reconnected_cb=connection._on_back,
            reconnect_time_wait=RECONNECT_WAIT_S,  # pyright: ignore[reportArgumentType]
            max_reconnect_attempts=-1,
            pending_size=PENDING_BYTES_MAX,
            ping_interval=PING_S,
            skip_subject_validation=True,
            **access.options,
        )
        try:
            await connection._dialing.wait(asyncio.create_task(connecting), CONNECT_S_MAX)
        except BaseException:
            await client.close()
            raise
        await connection.subscribe(f"{connection._inbox}.*", "", connection._on_reply)
        return connection

    async def close(self) -> None:
        """Send what is pending, then disconnect; idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        # Waiters first: they must not wait for a reply, or a connection, that will never come.
        self._fire_breaks()
        self._is_up.set()
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            await self._client.flush(2)
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._client.close()
        await end_reconnecting(self._client, RECONNECT_WAIT_S)

    async def flush(self) -> None:
        """Wait until the server has read everything that was sent."""
        try:
            await self._client.flush(10)
        except (nats.errors.Error, TimeoutError) as error:
            raise BusError(f"flush: {error or type(error).__name__}") from error

    async def subscribe(
        self, subject: str, queue: str, on_message: Callable[[Msg], Awaitable[None]]
    ) -> Subscription:
        """Subscribe; the client subscribes again by itself after a break."""
        return await self._client.subscribe(  # pyright: ignore[reportUnknownMemberType]
            subject, queue, cb=on_message
        )

    async def wait_connected(self) -> None:
        """Wait for the connection; the caller bounds the wait."""
        await self._is_up.wait()
        if self.is_closed:
            raise self._refusal or BusClosedError("the bus was closed")

    async def send(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message; while the connection is down, buffer it."""
        if self.is_closed:
            raise self._refusal or BusClosedError("the bus was closed")
        try:
            await self._client.publish(subject, data, reply, headers or None)
        except nats.errors.Error as error:
            if isinstance(error, nats.errors.ConnectionClosedError):
                # The client has given up but calls back only later; record the reason now.
                await self._on_closed()
            raise self._refusal or BusError(f"send to {subject}: {error}") from error

    @contextlib.contextmanager
    def replies(
        self, on_reply: OnReply, on_break: Callable[[], None], *, suffix: str = ""
    ) -> Generator[str, None, None]:
        """Yield a reply subject that ends in `suffix` and is valid while the body runs."""
        token = next(self._tokens)
        name = f"{token}{suffix}"
        self._replies[name] = on_reply
        self._breaks[token] = on_break
        try:
            yield f"{self._inbox}.{name}"
        finally:
            del self._replies[name]
            del self._breaks[token]

    @contextlib.asynccontextmanager
    async def inbox(
        self, on_message: OnReply, on_break: Callable[[], None]
    ) -> AsyncGenerator[str, None]:
        """Yield a prefix `p`; messages to `p.*` go to `on_message` while the body runs."""
        # JetStream delivers to the reply subject, but the message bears the subject that it was
        # stored under, so only a subscription per request identifies the request it answers.
        prefix = _new_inbox(self.access)
        token = next(self._tokens)

        async def forward(message: Msg) -> None:
            on_message(message)

        subscription = await self.subscribe(f"{prefix}.*", "", forward)
        self._breaks[token] = on_break
        try:
            yield prefix
        finally:
            del self._breaks[token]
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def ask(
        self,
        subject: str,
        data: bytes,
        *,
        deadline_s: float,
        headers: dict[str, str] | None = None,
        suffix: str = "",
    ) -> Msg:
        """Send a request and return its first reply, sent to a subject that ends in `suffix`.

        Raises:
            ConnectionLostError: The connection broke before the reply.
            DeadlineError: No reply in time.

        """
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        def on_reply(message: Msg) -> None:
            if not future.done():
                future.set_result(message)

        def on_break() -> None:
            if not future.done():
                future.set_exception(ConnectionLostError(f"{subject}: connection broke"))

        with self.replies(on_reply, on_break, suffix=suffix) as inbox:
            try:
                async with asyncio.timeout(deadline_s):
                    await self.wait_connected()
                    await self.send(subject, data, reply=inbox, headers=headers)
                    return await future
            except TimeoutError as error:
                raise DeadlineError(f"{subject}: no reply within {deadline_s} s") from error

    async def ask_until_served(  # noqa: PLR0913 - a request, and how long it is tried
        self,
        subject: str,
        data: bytes,
        *,
        deadline_s: float,
        attempt_s: float,
        headers: dict[str, str] | None = None,
        suffix: str = "",
    ) -> Msg:
        """Send an idempotent request, again after a break, `attempt_s` of silence, or no server.

        Raises:
            DeadlineError: No reply within `deadline_s`.

        """

        async def attempt() -> Msg:
            reply = await self.ask(
                subject, data, deadline_s=attempt_s, headers=headers, suffix=suffix
            )
            if status(reply) == NO_RESPONDERS:
                raise ConnectionLostError(f"{subject}: no server yet")
            return reply

        try:
            async with asyncio.timeout(deadline_s):
                return await with_retries(attempt, RETRY, retry_on=LOST)
        except TimeoutError as error:
            raise DeadlineError(f"{subject}: no reply within {deadline_s} s") from error

    async def api(
        self, call: str, body: dict[str, Any], *, deadline_s: float = API_S_MAX
    ) -> dict[str, Any]:
        """Call the JetStream API; retry while a cluster elects a leader.

        Raises:
            JetStreamError: JetStream refused the call.
            DeadlineError: No answer within `deadline_s`.

        """
        subject, data = f"$JS.API.{call}", json.dumps(body).encode()

        async def attempt() -> dict[str, Any]:
            reply = await self.ask_until_served(
                subject, data, deadline_s=deadline_s, attempt_s=API_ATTEMPT_S
            )
            return check_answer(reply, call)

        try:
            async with asyncio.timeout(deadline_s):
                return await with_retries(attempt, RETRY, retry_on=(UnavailableError,))
        except TimeoutError as error:
            raise DeadlineError(f"{call}: no answer within {deadline_s} s") from error

    async def _on_reply(self, message: Msg) -> None:
        on_reply = self._replies.get(message.subject.rsplit(".", 1)[-1])
        if on_reply is not None:
            on_reply(message)

    async def _on_break(self) -> None:
        if self.is_closed:
            return
        log.warning("connection to the NATS server broke; %d waiters notified", len(self._breaks))
        # Down before the callbacks: a request that is sent again must wait for the reconnection.
        self._is_up.clear()
        self._fire_breaks()

    def _fire_breaks(self) -> None:
        self.num_breaks += 1
        # A copy: callbacks remove themselves.
        for on_break in list(self._breaks.values()):
            on_break()

    async def _on_back(self) -> None:
        log.warning("reconnected to the NATS server after %d breaks", self.num_breaks)
        self._is_up.set()
        if self.restore is not None:
            task = asyncio.create_task(self.restore(), name="restore")
            # asyncio holds tasks weakly: without a reference it could be collected midway.
            self._restores.add(task)
            task.add_done_callback(self._restores.discard)

    async def _on_closed(self) -> None:
        """Give up once the client has: servers end a connection whose credentials expired."""
        if self.is_closed:
            return
        self.is_closed = True
        self._refusal = self._dialing.refusal(self._client.last_error)
        log.error("%s", self._refusal)
        self._fire_breaks()
        self._is_up.set()

    async def _on_error(self, error: Exception) -> None:
        self._dialing.note(error)
