"""The actor of one publishing rank: uploads its part of every version and verifies its span."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import ClassVar

from penstock.actors.relay.core.flat_snapshot import Table
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.handover import Handover
from penstock.actors.relay.publish.rank_publisher import RankPublisher
from penstock.actors.relay.publish.spans import Layout, assign_shards, cut_spans
from penstock.actors.relay.publish.verifier import SpanVerifier
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.weights import UploadWeights

log = logging.getLogger(__name__)

VERSION_S_MAX = 6 * 3600.0
"""Deadline of one version in seconds; it is generous because version 0 is a full snapshot, and a
dead rank is detected by its silence."""
_BEAT_S = 1.0
"""Time between two acknowledgements in seconds."""


def upload_service(rank: int) -> str:
    """Return the name of one rank's service."""
    return f"upload.{rank}"


class RankActor(Actor):
    """Uploads on request, with an `Ack` every second until its part is uploaded and verified.

    A repeated request joins its attempt, whether that is running or done. A new attempt cancels an
    older one, which can no longer be committed. Requests with an older token are refused.
    """

    role: ClassVar[str] = "publisher"

    def __init__(self, rank: int, num_ranks: int, handover: Path) -> None:
        """Initialize without reading anything.

        Args:
            rank: Number of this rank.
            num_ranks: Number of publishing ranks.
            handover: Folder of the file that the trainer writes snapshots to.

        """
        self._rank = rank
        self._num_ranks = num_ranks
        self._handover = handover
        self._attempt = ""
        self._token = 0
        self._uploading: asyncio.Task[None] | None = None
        self._table: Table | None = None
        self._layout: Layout
        self._publisher: RankPublisher
        self._verifier: SpanVerifier
        self._ctx: Context

    async def start(self, ctx: Context) -> Effects:
        """Keep the context."""
        self._ctx = ctx
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Cancel the running upload; the trainer requests it again after a restart."""
        if self._uploading is not None:
            self._uploading.cancel()
        return ()

    def services(self) -> Mapping[str, Serve]:
        """Return the service that uploads versions."""
        return {upload_service(self._rank): self._answer}

    async def _answer(self, message: Message) -> AsyncIterator[Message]:
        if not isinstance(message, UploadWeights):
            text = f"expected UploadWeights, got {type(message).__name__}"
            yield RemoteError(kind=RemoteErrorKind.INVALID, error=text)
            return
        if message.fencing_token < self._token:
            text = f"token {message.fencing_token}: taken over by {self._token}"
            log.warning("refusing weights %d: %s", message.policy_version, text)
            yield RemoteError(kind=RemoteErrorKind.GONE, error=text)
            return
        upload = self._begin(message)
        # `wait` does not cancel the upload if the requester goes away: its next request joins it.
        while not upload.done():
            yield Ack()
            await asyncio.wait([upload], timeout=_BEAT_S)
        if upload.cancelled():
            text = f"weights {message.policy_version}: a newer attempt took over"
            yield RemoteError(kind=RemoteErrorKind.GONE, error=text)
            return
        # Raises the error of a failed upload, which the trainer gets as the reply.
        upload.result()
        yield Ack()

    def _begin(self, message: UploadWeights) -> asyncio.Task[None]:
        """Return the task of an attempt; start it if it is new."""
        if self._uploading is not None and self._attempt == message.attempt:
            return self._uploading
        if self._uploading is not None and not self._uploading.done():
            self._uploading.cancel()
            # Threads of the cancelled attempt may still write to its publisher and verifier, so the
            # new attempt gets new ones.
            self._table = None
            log.warning("weights %d: a new attempt replaces a running one", message.policy_version)
        self._attempt, self._token = message.attempt, message.fencing_token
        self._uploading = asyncio.create_task(self._upload(message))
        return self._uploading

    async def _upload(self, message: UploadWeights) -> None:
        """Upload this rank's part and verify its span.

        Raises:
            StaleTokenError: Another committer took over.
            DeadlineError: The committer staged no manifest in time.
            OSError: The store has no room, or there is no handover file.

        """
        table = parse_msgpack(message.tensor_table, Table, "tensor_table")
        if table != self._table:
            self._prepare(table)
        version, token = message.policy_version, message.fencing_token
        handover = Handover(self._handover, token, table)
        parts = await self._ctx.offload(handover.read, self._layout)
        await self._publisher.upload(version, token, parts)
        await self._verifier.verify(version, token, wait_s=VERSION_S_MAX)
        log.info("weights %d: uploaded and verified under token %d", version, token)

    def _prepare(self, table: Table) -> None:
        spans = cut_spans(table, self._num_ranks)
        self._layout = assign_shards(table, self._num_ranks, spans)[self._rank]
        io = StoreIO(self._ctx.store)
        self._publisher = RankPublisher(io, self._rank, table, self._layout)
        self._verifier = SpanVerifier(io, self._rank, spans[self._rank])
        self._table = table
