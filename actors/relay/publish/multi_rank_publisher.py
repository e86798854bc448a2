"""The trainer's side if ranks publish: requests their uploads, and commits them.

```
 snapshot ─▶ file ─▶ rank 0: upload, verify ─┐
                 └─▶ rank 1: upload, verify ─┴─▶ Committer ─▶ manifest, head
```
Ranks that train (`shard_uploader.py`) have their parts already: there is no file.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.actors.policy.snapshot import ShardedVersion, Snapshot
from penstock.actors.relay.core.flat_snapshot import Table, tensor_table
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.handover import Handover
from penstock.actors.relay.publish.rank_actor import VERSION_S_MAX
from penstock.actors.relay.publish.rank_committer import Committer
from penstock.actors.relay.publish.spans import cut_spans
from penstock.messages.base import Message
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.weights import UploadWeights, WeightsPublished

_log = logging.getLogger(__name__)
_IDLE_S = 15.0
"""A rank that is silent for so long is dead or starting: the request is sent again."""
_NUM_REQUESTS_MAX = 20
StreamRequest = Callable[..., AsyncIterator[Message]]
"""`Bus.stream_request`."""


class VersionFacts(NamedTuple):
    """What a version's manifest says beside its tensors."""

    policy_version: int
    optimizer_step: int
    """The step that made it."""
    config_json: str
    """Of the policy."""
    probe: Sequence[float]
    """What the version computes."""


class RankUploads:
    """Requests the uploads of all ranks, and commits them."""

    def __init__(
        self,
        store: ObjectStore,
        num_ranks: int,
        request: StreamRequest,
        service: Callable[[int], str],
    ) -> None:
        """Prepare; nothing is read or claimed yet.

        Args:
            store: The origin.
            num_ranks: Number of ranks, each with all its part of a version.
            request: Sends a message to a rank's service.
            service: Name of the service of a rank that answers `UploadWeights`.

        """
        self._io = StoreIO(store)
        self._num_ranks = num_ranks
        self._request = request
        self._service = service
        self._table: Table | None = None
        self._committer: Committer
        self._has_failed = False
        """Whether the newest attempt failed: markers may be left under its token."""

    async def commit(
        self, facts: VersionFacts, table: Table, hand_over: Callable[[int], Awaitable[object]]
    ) -> WeightsPublished:
        """Have a version uploaded, and commit it.

        Args:
            facts: Of the version.
            table: Of its tensors.
            hand_over: Called first, with the token of the attempt.

        Raises:
            StaleTokenError: Another committer took over.
            RemoteCallError: A rank failed; the text has the cause.
            DeadlineError: A rank did not answer.
            CorruptDataError: The uploads are not one version.
            PublishConflictError: This version was committed before, from other weights.
            OSError: No room in the store.

        """
        if table != self._table:
            spans = cut_spans(table, self._num_ranks)
            self._committer = Committer(self._io, self._num_ranks, table, spans)
            self._table = table
        token = await self._committer.begin(new_token=self._has_failed)
        self._has_failed = True
        await hand_over(token)
        message = UploadWeights(
            policy_version=facts.policy_version,
            fencing_token=token,
            attempt=secrets.token_hex(8),
            tensor_table=msgspec.msgpack.encode(table),
        )
        try:
            async with asyncio.TaskGroup() as group:
                ranks = range(self._num_ranks)
                uploads = [group.create_task(self._upload(rank, message)) for rank in ranks]
                manifest = await self._committer.commit(
                    facts.policy_version,
                    optimizer_step=facts.optimizer_step,
                    config_json=facts.config_json,
                    probe=facts.probe,
                    wait_s=VERSION_S_MAX,
                )
                # A rank that died after its verification would wait for a staged manifest.
                for upload in uploads:
                    upload.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._has_failed = False
        return manifest

    async def _upload(self, rank: int, message: UploadWeights) -> None:
        """Request one rank's upload, again if it dies; finished work is not repeated."""
        for num_left in reversed(range(_NUM_REQUESTS_MAX)):
            try:
                async for _ in self._request(self._service(rank), message, idle_s=_IDLE_S):
                    pass
            except (BusError, DeadlineError) as error:
                if not num_left:
                    raise
                _log.warning("rank %d: requesting again: %s", rank, error)
            else:
                return


class MultiRankPublisher:
    """A `SnapshotPublisher` whose versions are uploaded by ranks in processes of their own."""

    def __init__(self, uploads: RankUploads, handover: Path) -> None:
        """Prepare; nothing is read or claimed yet.

        Args:
            uploads: Of the `RankActor` processes.
            handover: Folder of the file that snapshots are written to.

        """
        self._uploads = uploads
        self._handover = handover

    async def prepare(
        self,
        policy_version: int,
        snapshot: Snapshot,
        *,
        optimizer_step: int,
        config_json: str,
        probe: Sequence[float] = (),
    ) -> WeightsPublished:
        """Store and commit one version; see `SnapshotPublisher.prepare`.

        Raises as `RankUploads.commit`, and OSError where there is no room for the file.
        """
        table = tensor_table(snapshot)

        async def hand_over(token: int) -> None:
            await asyncio.to_thread(Handover(self._handover, token, table).write, snapshot)

        facts = VersionFacts(policy_version, optimizer_step, config_json, probe)
        return await self._uploads.commit(facts, table, hand_over)


async def publish_shards(uploads: RankUploads, version: ShardedVersion) -> WeightsPublished:
    """Publish a version that the ranks which train hold; raises as `RankUploads.commit`."""
    zeros = (np.zeros((), np.uint16), np.zeros((), np.float32))
    whole = {
        name: np.broadcast_to(zeros[name in version.float32], tuple(shape))
        for name, shape in version.shapes.items()
    }

    async def nothing(_token: int) -> None:
        """Hand nothing over: the ranks have the weights."""

    number = version.policy_version
    facts = VersionFacts(number, number, version.config_json, version.probe)
    return await uploads.commit(facts, tensor_table(whole), nothing)
