"""The client of `generate`, of rollout workers and the gateway."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import BrokenTurnError
from penstock.actors.runtime.context import Context
from penstock.messages.base import Message
from penstock.messages.errors import BusError
from penstock.messages.generation import Generate, TokensSampled, pinned_version


class ReplicaLostError(BusError):
    """The replica left, fell silent or started again before the request was answered."""


class WrongVersionError(BusError):
    """A request of one version was answered by another."""


async def stream_chunks(  # noqa: PLR0913 - a request, whom to ask, and its bounds
    ctx: Context,
    replicas: ReplicaTable,
    request: Generate,
    asked: set[str],
    *,
    idle_s: float,
    reason: str,
) -> AsyncGenerator[TokensSampled, None]:
    """Ask one replica; yield its chunks as they arrive.

    Args:
        ctx: The asking actor's.
        replicas: Those there are.
        request: Names purpose, channel and session, which decide on the replica.
        asked: Replicas that this turn's earlier attempts asked; the one asked now is added.
        idle_s: Longest wait for a replica that serves this, and for each chunk.
        reason: For the wait-for graph.

    Raises:
        ReplicaLostError: The replica was lost on the way.
        WrongVersionError: The channel is one version, and another one answered.
        RemoteCallError, BusError, DeadlineError: As `Context.stream_request`.

    """
    session, purpose, channel = request.session_id, request.purpose, request.channel
    async with ctx.waiting(f"generate.{purpose}", reason, deadline_s=idle_s):
        replica = await replicas.chosen(session, purpose, channel, asked)
    asked.add(replica)
    service = f"generate.{purpose}.{replica}"
    replies = ctx.stream_request(service, request, idle_s=idle_s, reason=reason, is_served=True)
    with replicas.using(replica) as lost:
        async with aclosing(replies):
            while (reply := await _next(replies, lost, service)) is not None:
                yield _checked(reply, request, service)


async def _next(
    replies: AsyncGenerator[Message, None], lost: asyncio.Future[None], service: str
) -> Message | None:
    """Return the next reply, or None at the end."""
    gone = f"{service}: the replica is gone"
    if lost.done():
        raise ReplicaLostError(gone)
    bound = asyncio.timeout(None)

    def stop(_: object) -> None:
        with suppress(RuntimeError):  # The reply came first: the wait is over.
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
        raise BrokenTurnError(f"{service}: unexpected {type(reply).__name__}")
    expected, found = pinned_version(request.channel), reply.policy_version
    if expected is not None and found != expected:
        raise WrongVersionError(f"{service}: expected version {expected}, got {found}")
    return reply
