"""Client of the `generate` service, used by rollout workers and the gateway."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import BrokenTurnError
from penstock.actors.runtime.context import Context
from penstock.messages.base import Message
from penstock.messages.errors import BusError
from penstock.messages.generation import Generate, TokensSampled, pinned_version

log = logging.getLogger(__name__)


class ReplicaLostError(BusError):
    """The replica left, went silent or restarted before it answered the request."""


class WrongVersionError(BusError):
    """A request pinned to one version was answered by another version."""


async def stream_chunks(  # noqa: PLR0913 - request, replicas and bounds
    ctx: Context,
    replicas: ReplicaTable,
    request: Generate,
    asked: set[str],
    *,
    idle_s: float,
    reason: str,
) -> AsyncGenerator[TokensSampled, None]:
    """Send a request to one replica and yield its chunks as they arrive.

    Args:
        ctx: Context of the calling actor.
        replicas: Known replicas.
        request: Request, whose purpose, channel and session decide on the replica.
        asked: Replicas tried by earlier attempts of this turn; the chosen one is added.
        idle_s: Longest wait in seconds for a suitable replica, and for each chunk.
        reason: Reason of the wait, shown in the wait-for graph.

    Raises:
        ReplicaLostError: The replica was lost before the request was finished.
        WrongVersionError: The request is pinned to a version, and another one answered.
        RemoteCallError, BusError, DeadlineError: See `Context.stream_request`.

    """
    session, purpose, channel = request.session_id, request.purpose, request.channel
    async with ctx.waiting(f"generate.{purpose}", reason, deadline_s=idle_s):
        replica = await replicas.chosen(session, purpose, channel, asked)
    asked.add(replica)
    log.debug("request %s goes to replica %s", request.request_id, replica)
    service = f"generate.{purpose}.{replica}"
    replies = ctx.stream_request(service, request, idle_s=idle_s, reason=reason, is_served=True)
    with replicas.using(replica) as lost:
        async with aclosing(replies):
            while (reply := await _next(replies, lost, service)) is not None:
                yield _checked(reply, request, service)


async def _next(
    replies: AsyncGenerator[Message, None], lost: asyncio.Future[None], service: str
) -> Message | None:
    """Return the next reply, or None at the end.

    Raises:
        ReplicaLostError: `lost` is done, or becomes done before the reply comes.

    """
    gone = f"{service}: the replica is gone"
    if lost.done():
        raise ReplicaLostError(gone)
    # A timeout that only `lost` triggers; it avoids a task per reply.
    bound = asyncio.timeout(None)

    def stop(_: object) -> None:
        # RuntimeError: the reply came first and the timeout has already ended.
        with suppress(RuntimeError):
            bound.reschedule(0.0)

    try:
        async with bound:
            lost.add_done_callback(stop)
            try:
                return await anext(replies, None)
            finally:
                lost.remove_done_callback(stop)
    except TimeoutError as error:
        if not bound.expired():
            raise
        raise ReplicaLostError(gone) from error


def _checked(reply: Message, request: Generate, service: str) -> TokensSampled:
    if not isinstance(reply, TokensSampled):
        raise BrokenTurnError(f"{service}: expected TokensSampled, got {type(reply).__name__}")
    expected, found = pinned_version(request.channel), reply.policy_version
    if expected is not None and found != expected:
        raise WrongVersionError(f"{service}: expected version {expected}, got {found}")
    return reply
