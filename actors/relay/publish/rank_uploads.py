"""The trainer's side when ranks publish: requests their uploads, and commits the result.

```
 rank 0: upload, verify ─┐
 rank 1: upload, verify ─┴─▶ Committer ─▶ manifest, head
```
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np

from penstock.actors.policy.snapshot import ShardedVersion
from penstock.actors.relay.core.flat_snapshot import Table, tensor_table
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.rank_attempt import VERSION_S_MAX
from penstock.actors.relay.publish.rank_committer import Committer
from penstock.actors.relay.publish.spans import cut_spans
from penstock.messages.base import Message
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.weights import UploadWeights, WeightsPublished

log = logging.getLogger(__name__)
_IDLE_S = 15.0
"""Silence of a rank in seconds, which acknowledges every second, after which the request is sent
again; the rank is dead or starting."""
_NUM_REQUESTS_MAX = 20
"""Largest number of requests per rank and version, about 5 minutes of silence."""
StreamRequest = Callable[..., AsyncIterator[Message]]
"""Signature of `Bus.stream_request`."""


class RankUploads:
    """Requester of the uploads of all ranks, which also commits them."""

    def __init__(
        self,
        store: ObjectStore,
        num_ranks: int,
        request: StreamRequest,
        service: Callable[[int], str],
    ) -> None:
        """Initialize without reading or claiming anything.

        Args:
            store: Origin store.
            num_ranks: Number of ranks that together hold a version.
            request: Function that sends a message to a rank's service.
            service: Function from a rank to the name of its service for `UploadWeights`.

        """
        self._io = StoreIO(store)
        self._num_ranks = num_ranks
        self._request = request
        self._service = service
        self._table: Table | None = None
        self._committer: Committer
        self._has_failed = False
        """Whether the newest attempt failed, which may have left markers under its token."""

    async def publish(self, version: ShardedVersion) -> WeightsPublished:
        """Request the uploads of a version from all ranks, and commit it; see `PublishShards`.

        Raises:
            StaleTokenError: Another committer took over.
            RemoteCallError: A rank failed; the text has the cause.
            DeadlineError: A rank did not answer.
            CorruptDataError: The uploads do not form one version.
            PublishConflictError: This version was already committed from other weights.
            OSError: The store has no room.

        """
        # Only names, shapes and dtypes are needed: broadcast zeros stand in for the tensors without
        # using memory.
        zeros = (np.zeros((), np.uint16), np.zeros((), np.float32))
        whole = {
            name: np.broadcast_to(zeros[name in version.float32], tuple(shape))
            for name, shape in version.shapes.items()
        }
        table = tensor_table(whole)
        if table != self._table:
            spans = cut_spans(table, self._num_ranks)
            self._committer = Committer(self._io, self._num_ranks, table, spans)
            self._table = table
        # After a failure a new token, so that markers of the failed attempt do not count.
        token = await self._committer.begin(new_token=self._has_failed)
        # Reset at the end: any exception on the way leaves it set.
        self._has_failed = True
        message = UploadWeights(
            policy_version=version.policy_version,
            fencing_token=token,
            attempt=secrets.token_hex(8),
            tensor_table=msgspec.msgpack.encode(table),
        )
        try:
            async with asyncio.TaskGroup() as group:
                ranks = range(self._num_ranks)
                uploads = [group.create_task(self._upload(rank, message)) for rank in ranks]
                manifest = await self._committer.commit(
                    version.policy_version,
                    optimizer_step=version.policy_version,
                    config_json=version.config_json,
                    probe=version.probe,
                    wait_s=VERSION_S_MAX,
                )
                # The version is committed. A rank that restarted after its verification would now
                # wait in vain for a staged manifest.
                for upload in uploads:
                    upload.cancel()
        # Callers handle the error of one rank; the others were cancelled because of it.
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._has_failed = False
        return manifest

    async def _upload(self, rank: int, message: UploadWeights) -> None:
        """Request one rank's upload, and repeat the request if the rank falls silent."""
        for num_left in reversed(range(_NUM_REQUESTS_MAX)):
            try:
                async for _ in self._request(self._service(rank), message, idle_s=_IDLE_S):
                    pass
            except (BusError, DeadlineError) as error:
                if not num_left:
                    raise
                # The request has the same attempt id: a rank that still works on it joins.
                log.warning(
                    "rank %d: requesting weights %d again, %d requests left: %s",
                    rank,
                    message.policy_version,
                    num_left,
                    error,
                )
            else:
                return
