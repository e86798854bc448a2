"""A snapshot that many trainer ranks hold together: each uploads its own part, none gathers it.

```
 rank 0  diff, upload own runs ─▶ receipt ─┐                          ┌─▶ Prover 0: reads back ─┐
 rank 1  diff, upload own runs ─▶ receipt ─┼─▶ Committer: all there, ─┼─▶ Prover 1: reads back ─┤
 rank n  diff, upload own runs ─▶ receipt ─┘   nothing twice?         └─▶ ...                   │
                          one swap of the head ◀─ one manifest ◀─ do all digests add up? ◀──────┘
```
Runs are in global flat coordinates, so that whoever receives them may be cut otherwise. All that
they tell each other goes through the store (`attempt.py`); version and token (which is that of one
attempt) come from the committer, by whatever means the ranks talk. A rank that dies leaves the head
where it was: it, or all of them under a new token, ship again.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from penstock.actors.sync_relay.core.flat_snapshot import Table, dtype_at, table_digest
from penstock.actors.sync_relay.core.head import HeadSlot, StaleTokenError, read_head
from penstock.actors.sync_relay.core.objects import Encoded, Origin
from penstock.actors.sync_relay.core.transfer import Sleep
from penstock.actors.sync_relay.publish.attempt import Receipt, put_note, receipts_prefix
from penstock.actors.sync_relay.publish.history import read_back, was_committed
from penstock.actors.sync_relay.publish.shipping import Offload, Piece, store_shards
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import NotFoundError
from penstock.messages.weights import Extent, SnapshotKind

Parts = list[np.ndarray]
"""[N] bit patterns a shard, its runs one after the other."""


class RankPublisher:
    """One rank's side; holds two copies of its part."""

    def __init__(  # noqa: PLR0913 - who it is, of what, where to
        self,
        store: ObjectStore,
        rank: int,
        table: Table,
        layout: Sequence[Sequence[Extent]],
        *,
        sleep: Sleep = asyncio.sleep,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            store: the origin.
            rank: its number.
            table: of the whole snapshot.
            layout: the runs of each of its shards, of one dtype each; see `image.find_runs`. None
                for a part without elements.
            sleep: waits between attempts.
            offload: runs blocking work.

        """
        self._store = store
        self._rank = rank
        self._table = table
        self._layout = layout
        self._shards = [runs for runs in layout if runs]
        self._dtypes = [dtype_at(table, runs[0].start) for runs in self._shards]
        self._sleep = sleep
        self._offload = offload
        self._shipped: tuple[int, list[Encoded], Parts] | None = None
        self._committed: tuple[int, Parts] | None = None

    async def ship(self, version: int, token: int, parts: Sequence[np.ndarray]) -> None:
        """Upload this rank's part of a version, then the receipt for it.

        Args:
            version: the one after the head's.
            token: of the attempt; see `Committer.begin`.
            parts: [N] bit patterns a shard, of unsigned integers, contiguous; they are copied.

        Raises:
            StaleTokenError: another committer took over.
            NotFoundError: the version before is not committed, or no longer in the store.
            DamagedStoreError: the store gives damaged objects, attempt after attempt.
            ValueError: parts that do not fit the layout.
            OSError: no room, after several attempts.

        """
        self._check(parts)
        head = await read_head(self._store)
        if head.token > token:
            raise StaleTokenError(f"rank {self._rank}: token {token}, the head's is {head.token}")
        if head.policy_version < version - 1:
            raise NotFoundError(f"weights {version - 1}: not committed; the head is {head}")
        base = await self._base(version - 1, head) if version else [None] * len(self._shards)
        own = [part for runs, part in zip(self._layout, parts, strict=True) if runs]
        copies = await self._offload(_copies, own)
        numbers = [runs[0].start + 1 for runs in self._shards]  # 0 is an anchor's table
        pieces = map(Piece, numbers, self._shards, base, copies, self._dtypes)
        origin = Origin(
            policy_version=version,
            base_version=version - 1,
            kind=SnapshotKind.DELTA if version else SnapshotKind.ANCHOR,
            optimizer_step=version,
            fencing_token=token,
        )
        shards = await store_shards(self._store, origin, [*pieces], self._sleep, self._offload)
        receipt = Receipt(rank=self._rank, table_digest=table_digest(self._table), shards=shards)
        key = f"{receipts_prefix(version, token)}{self._rank:05d}"
        await put_note(self._store, key, receipt, self._sleep)
        self._shipped = version, shards, copies

    def _check(self, parts: Sequence[np.ndarray]) -> None:
        sizes = [sum(run.num_elements for run in runs) for runs in self._layout]
        if (found := [part.size for part in parts]) != sizes:
            raise ValueError(f"rank {self._rank}: expected parts of {sizes} elements, got {found}")

    async def _base(self, version: int, head: HeadSlot) -> Parts:
        """Return this rank's part of a committed version; keep it until the next is committed."""
        shipped, self._shipped = self._shipped, None
        if self._committed is not None and self._committed[0] == version:
            return self._committed[1]
        self._committed = None
        if shipped is not None and shipped[0] == version:
            _, shards, parts = shipped
            if await was_committed(self._store, version, head, shards):
                self._committed = version, parts
                return parts
        image, _ = await read_back(self._store, version, self._sleep, self._offload)
        own = [image.part(runs) for runs in self._shards]
        self._committed = version, await self._offload(_copies, own)
        return self._committed[1]


def _copies(parts: Parts) -> Parts:
    return [part.copy() for part in parts]
