"""The trainer's side where ranks publish: hands each version over, and commits what they ship.

```
 snapshot ─▶ file ─▶ rank 0: ship, prove ─┐
                 └─▶ rank 1: ship, prove ─┴─▶ Committer ─▶ manifest, head
```
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from penstock.actors.policy.snapshot import Snapshot
from penstock.actors.sync_relay.core.flat_snapshot import Table, tensor_table
from penstock.actors.sync_relay.publish.committer import Committer
from penstock.actors.sync_relay.publish.handover import Handover
from penstock.actors.sync_relay.publish.publisher_rank import VERSION_S_MAX, ship_service
from penstock.actors.sync_relay.publish.spans import cut_spans
from penstock.messages.base import Message
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.weights import ShipWeights, WeightsPublished

_log = logging.getLogger(__name__)
_IDLE_S = 15.0
"""A rank that says nothing for so long is dead, or being started: it is asked again."""
_NUM_ASKS_MAX = 20
StreamRequest = Callable[..., AsyncIterator[Message]]
"""`Bus.stream_request`."""


class RankedPublisher:
    """A `SnapshotPublisher` whose versions are uploaded by ranks in processes of their own."""

    def __init__(
        self, store: ObjectStore, num_ranks: int, handover: Path, ask: StreamRequest
    ) -> None:
        """Prepare; nothing is read or claimed yet.

        Args:
            store: the origin.
            num_ranks: as many actors `PublisherRank`.
            handover: the folder of the file that snapshots are written to.
            ask: passes a message to a rank's service.

        """
        self._store = store
        self._num_ranks = num_ranks
        self._handover = handover
        self._ask = ask
        self._table: Table | None = None
        self._committer: Committer
        self._has_failed = False
        """The newest attempt, of which something may be left under its token."""

    async def prepare(
        self, policy_version: int, snapshot: Snapshot, *, optimizer_step: int, config_json: str
    ) -> WeightsPublished:
        """Store and commit one version; see `SnapshotPublisher.prepare`.

        Raises:
            StaleTokenError: another committer took over.
            RemoteCallError: a rank failed; the text says of what.
            DeadlineError: a rank did not answer.
            CorruptDataError: what the ranks shipped is not one version.
            PublishConflictError: this version was committed before, from other weights.
            OSError: no room in the store, or for the file.

        """
        table = tensor_table(snapshot)
        if table != self._table:
            spans = cut_spans(table, self._num_ranks)
            self._committer = Committer(self._store, self._num_ranks, table, spans)
            self._table = table
        token = await self._committer.begin(fresh=self._has_failed)
        self._has_failed = True
        await asyncio.to_thread(Handover(self._handover, token, table).write, snapshot)
        message = ShipWeights(
            policy_version=policy_version,
            fencing_token=token,
            attempt=secrets.token_hex(8),
            tensor_table=msgspec.msgpack.encode(table),
        )
        try:
            async with asyncio.TaskGroup() as group:
                ranks = range(self._num_ranks)
                asking = [group.create_task(self._ship(rank, message)) for rank in ranks]
                manifest = await self._committer.commit(
                    policy_version,
                    optimizer_step=optimizer_step,
                    config_json=config_json,
                    wait_s=VERSION_S_MAX,
                )
                for one in asking:  # a rank that died after its proof would wait for a draft
                    one.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._has_failed = False
        return manifest

    async def _ship(self, rank: int, message: ShipWeights) -> None:
        """Have one rank ship, again if it dies; what it did before is not done twice."""
        for num_left in reversed(range(_NUM_ASKS_MAX)):
            try:
                async for _ in self._ask(ship_service(rank), message, idle_s=_IDLE_S):
                    pass
            except (BusError, DeadlineError) as error:
                if not num_left:
                    raise
                _log.warning("rank %d: asking again: %s", rank, error)
            else:
                return
