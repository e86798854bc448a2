"""Uploads one rank's part of a snapshot that many ranks hold together and no process gathers.

```
 rank 0  diff, upload own runs ─▶ marker ─┐                          ┌─▶ verifier 0: reads back ─┐
 rank 1  diff, upload own runs ─▶ marker ─┼─▶ Committer: complete,  ─┼─▶ verifier 1: reads back ─┤
 rank n  diff, upload own runs ─▶ marker ─┘   nothing twice?         └─▶ ...                     │
                        one swap of the head ◀─ one manifest ◀─ do all digests add up? ◀─────────┘
```
Extents are in global flat coordinates, so that receivers may be divided differently. Ranks,
verifiers and committer communicate through the store (`rank_attempt.py`); only the version and the
token of the attempt reach ranks in another way. If a rank dies, the head does not move: that rank
uploads again, or all ranks do under a new token.
"""

from collections.abc import Sequence

import numpy as np

from penstock.actors.relay.core.flat_snapshot import Table, dtype_at, table_digest
from penstock.actors.relay.core.objects import EncodedObject, ManifestHeader, ShardInput
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.core.version_head import HeadSlot, StaleTokenError, read_head
from penstock.actors.relay.publish.history import read_back_part, was_committed
from penstock.actors.relay.publish.publisher import Encode, store_shards
from penstock.actors.relay.publish.rank_attempt import RankUpload, attempt_prefix, put_marker
from penstock.messages.errors import NotFoundError
from penstock.messages.weights import Extent, SnapshotKind

Parts = list[np.ndarray]
"""[N] bit patterns per shard, its extents concatenated."""


class RankPublisher:
    """Uploader of one rank's part, of which it holds two copies (base and new)."""

    def __init__(
        self,
        io: StoreIO,
        rank: int,
        table: Table,
        layout: Sequence[Sequence[Extent]],
        *,
        encode: Encode | None = None,
    ) -> None:
        """Initialize without reading anything.

        Args:
            io: Origin store.
            rank: Number of this rank.
            table: Tensor table of the whole snapshot.
            layout: Extents of each of the rank's shards, of one dtype each; see
                `shard_uploader.shards_of_runs`. Empty for a part without elements.
            encode: Function that encodes a shard; by default `encode_shard` on `io.offload`.

        """
        self._io = io
        self._encode = encode
        self._rank = rank
        self._table = table
        self._layout = layout
        self._shards = [runs for runs in layout if runs]
        self._dtypes = [dtype_at(table, runs[0].start) for runs in self._shards]
        self._uploaded: tuple[int, list[EncodedObject], Parts] | None = None
        self._committed: tuple[int, Parts] | None = None

    async def upload(self, version: int, token: int, parts: Sequence[np.ndarray]) -> None:
        """Upload this rank's part of a version, then its marker.

        Args:
            version: The version after the head's.
            token: Token of the attempt; see `Committer.begin`.
            parts: [N] bit patterns per shard, unsigned integers, contiguous; they are copied.

        Raises:
            StaleTokenError: Another committer took over.
            NotFoundError: The version before is not committed, or no longer in the store.
            DamagedStoreError: Objects were damaged or missing in every attempt.
            ValueError: The parts do not fit the layout.
            OSError: The store has no room, after several attempts.

        """
        self._check(parts)
        head = await read_head(self._io.store)
        if head.token > token:
            raise StaleTokenError(f"rank {self._rank}: token {token}, the head's is {head.token}")
        # The base must be committed, as a delta against anything else could never be applied.
        if head.policy_version < version - 1:
            raise NotFoundError(f"weights {version - 1}: not committed; the head is {head}")
        base = await self._base(version - 1, head) if version else [None] * len(self._shards)
        nonempty = [part for runs, part in zip(self._layout, parts, strict=True) if runs]
        # Copied, as the caller overwrites its buffers with the next version while this one may
        # still be needed as its base.
        copies = await self._io.offload(_copies, nonempty)
        # Numbered by position, which is unique across ranks; 0 is a full snapshot's table.
        numbers = [runs[0].start + 1 for runs in self._shards]
        inputs = map(ShardInput, numbers, self._shards, base, copies, self._dtypes)
        header = ManifestHeader(
            policy_version=version,
            base_version=version - 1,
            kind=SnapshotKind.DELTA if version else SnapshotKind.FULL,
            optimizer_step=version,
            fencing_token=token,
        )
        shards = await store_shards(self._io, header, [*inputs], self._encode)
        upload = RankUpload(rank=self._rank, table_digest=table_digest(self._table), shards=shards)
        key = f"{attempt_prefix(version, token)}{self._rank:05d}"
        # Last: the marker promises the committer that all shards are stored.
        await put_marker(self._io, key, upload)
        self._uploaded = version, shards, copies

    def _check(self, parts: Sequence[np.ndarray]) -> None:
        sizes = [sum(run.num_elements for run in runs) for runs in self._layout]
        if (found := [part.size for part in parts]) != sizes:
            raise ValueError(f"rank {self._rank}: expected parts of {sizes} elements, got {found}")

    async def _base(self, version: int, head: HeadSlot) -> Parts:
        """Return this rank's part of a committed version; keep it until the next is committed."""
        # Cleared first: if this fails, the next attempt must not trust an uncommitted upload.
        uploaded, self._uploaded = self._uploaded, None
        if self._committed is not None and self._committed[0] == version:
            return self._committed[1]
        self._committed = None
        if uploaded is not None and uploaded[0] == version:
            _, shards, parts = uploaded
            # What this rank uploaded last may have lost against another attempt.
            if await was_committed(self._io.store, version, head, shards):
                self._committed = version, parts
                return parts
        runs = [run for runs in self._shards for run in runs]
        if not runs:
            return []
        flat = await read_back_part(self._io, version, runs)
        views = [flat.part(runs) for runs in self._shards]
        # Copied, as views would keep the memory of the whole snapshot.
        self._committed = version, await self._io.offload(_copies, views)
        return self._committed[1]


def _copies(parts: Parts) -> Parts:
    return [part.copy() for part in parts]
