"""One publishing rank as an actor: ships its part of every version, and proves its tensors."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.core.flat_snapshot import Table
from penstock.actors.sync_relay.publish.handover import Handover
from penstock.actors.sync_relay.publish.ranks import RankPublisher
from penstock.actors.sync_relay.publish.spans import Layout, cut_spans, share_out
from penstock.actors.sync_relay.publish.verifier import Prover
from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.weights import ShipWeights

VERSION_S_MAX = 6 * 3600.0
"""For all ranks to upload theirs: version 0 is whole. Who is dead is known by saying nothing."""
_BEAT_S = 1.0


def ship_service(rank: int) -> str:
    """Return the name of the service that one rank gives."""
    return f"ship.{rank}"


class PublisherRank(Actor):
    """Answers the trainer: an `Ack` every second until its part is shipped and proved.

    Who asks again for an attempt that is on its way, or done, is told of that one. A new attempt
    ends an old one, which nobody commits any more; one under an older token is refused.
    """

    role: ClassVar[str] = "publisher"

    def __init__(self, rank: int, num_ranks: int, handover: Path) -> None:
        """Args: `handover` is the folder of the file that the trainer writes snapshots to."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._handover = handover
        self._attempt = ""
        self._token = 0
        self._shipping: asyncio.Task[None] | None = None
        self._table: Table | None = None
        self._layout: Layout
        self._publisher: RankPublisher
        self._prover: Prover
        self._ctx: Context

    async def start(self, ctx: Context) -> Effects:
        """Get to know the store."""
        self._ctx = ctx
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """End what is on its way: it is shipped again after a restart."""
        if self._shipping is not None:
            self._shipping.cancel()
        return ()

    def services(self) -> Mapping[str, Serve]:
        """Return the service that ships versions."""
        return {ship_service(self._rank): self._answer}

    async def _answer(self, message: Message) -> AsyncIterator[Message]:
        if not isinstance(message, ShipWeights):
            text = f"expected ShipWeights, got {type(message).__name__}"
            yield RemoteError(kind=RemoteErrorKind.INVALID, error=text)
            return
        if message.fencing_token < self._token:
            text = f"token {message.fencing_token}: taken over by {self._token}"
            yield RemoteError(kind=RemoteErrorKind.GONE, error=text)
            return
        shipping = self._begin(message)
        while not shipping.done():
            yield Ack()
            await asyncio.wait([shipping], timeout=_BEAT_S)
        if shipping.cancelled():
            text = f"weights {message.policy_version}: a newer attempt took over"
            yield RemoteError(kind=RemoteErrorKind.GONE, error=text)
            return
        shipping.result()
        yield Ack()

    def _begin(self, message: ShipWeights) -> asyncio.Task[None]:
        """Return the task of an attempt, begun now if it is new."""
        if self._shipping is not None and self._attempt == message.attempt:
            return self._shipping
        if self._shipping is not None and not self._shipping.done():
            self._shipping.cancel()
            self._table = None  # its threads may still write to what belongs to it
        self._attempt, self._token = message.attempt, message.fencing_token
        self._shipping = asyncio.create_task(self._ship(message))
        return self._shipping

    async def _ship(self, message: ShipWeights) -> None:
        """Ship and prove.

        Raises:
            StaleTokenError: another committer took over.
            DeadlineError: no draft to prove came from the committer.
            OSError: no room in the store, or nothing was handed over.

        """
        table = msgspec.msgpack.decode(message.tensor_table, type=Table)
        if table != self._table:
            self._prepare(table)
        version, token = message.policy_version, message.fencing_token
        handover = Handover(self._handover, token, table)
        parts = await self._ctx.offload(handover.read, self._layout)
        await self._publisher.ship(version, token, parts)
        await self._prover.prove(version, token, wait_s=VERSION_S_MAX)

    def _prepare(self, table: Table) -> None:
        spans = cut_spans(table, self._num_ranks)
        self._layout = share_out(table, self._num_ranks, spans)[self._rank]
        self._publisher = RankPublisher(self._ctx.store, self._rank, table, self._layout)
        self._prover = Prover(self._ctx.store, self._rank, spans[self._rank])
        self._table = table
