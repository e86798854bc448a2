"""Reads some whole tensors of a version back from the store, and digests them.

Ranks may hold any part of a tensor, but its digest is that of the whole tensor, so that some
process must see all of it. A verifier does so for its span of tensors: it writes every rank's
shards over its copy and digests that. What is committed is then what the store really holds. It
holds one copy of its span and the elements that the last shards overwrote: a failed attempt is
undone.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from penstock.actors.relay.core.catalog import NOTHING
from penstock.actors.relay.core.digests import DigestTable, make_table
from penstock.actors.relay.core.flat_snapshot import FlatSnapshot
from penstock.actors.relay.core.objects import EncodedObject
from penstock.actors.relay.core.store_io import StoreIO, for_each_shard
from penstock.actors.relay.core.version_head import read_head
from penstock.actors.relay.publish.history import read_back_part, was_committed
from penstock.actors.relay.publish.rank_attempt import (
    StagedManifest,
    Verification,
    await_keys,
    join_verifications,
    put_marker,
    read_marker,
    staged_prefix,
    verified_key,
)
from penstock.actors.relay.publish.spans import Span
from penstock.kernels import delta
from penstock.kernels.delta import Patch
from penstock.kernels.digest import run_element_sum
from penstock.messages.errors import CorruptDataError, DeadlineError
from penstock.messages.weights import Extent, ShardRef

Undo = list[tuple[list[Extent], Patch]]
"""Former contents of some runs."""


class SpanDecoder:
    """What a verifier computes: decoding of shards and digests of tensors, off the event loop."""

    def __init__(self, offload: Callable[..., Awaitable[Any]]) -> None:
        self._offload = offload

    async def apply(
        self, flat: FlatSnapshot, runs: list[Extent], data: bytes, undo: Undo | None
    ) -> None:
        """Write a shard over its base, and append the former contents to `undo`.

        Raises:
            CorruptDataError: The shard was made against another base.

        """
        await self._offload(_apply_shard, flat, runs, data, undo)

    async def digest(self, name: str, array: np.ndarray, start: int) -> Verification:
        """Digest one tensor, whose first element is at a flat coordinate."""
        return await self._offload(_digest_tensor, name, array, start)


class SpanVerifier:
    """One per span; runs beside a rank, or in a process of its own."""

    def __init__(
        self, io: StoreIO, number: int, span: Span, *, decoder: SpanDecoder | None = None
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            io: The origin.
            number: Index of the span.
            span: Its tensors, from `spans.cut_spans`.
            decoder: Decodes and digests; by default on `io.offload`.

        """
        self._io = io
        self._number = number
        self._span = span
        self._decoder = decoder or SpanDecoder(io.offload)
        self._snapshot: FlatSnapshot | None = None
        self._version = NOTHING
        """Version of the snapshot."""
        self._shards: list[EncodedObject] = []
        """Shards that made it."""
        self._undo: Undo = []
        """Leads back to the version before."""

    async def verify(self, version: int, token: int, *, wait_s: float = 600.0) -> None:
        """Wait for the staged manifest of a version, read its shards, store the verification.

        Raises:
            DeadlineError: No staged manifest in time.
            DamagedStoreError: The store returns damaged objects, attempt after attempt.
            NotFoundError: The version before is no longer in the store.
            OSError: No room, after several attempts.

        """
        found = await await_keys(self._io, staged_prefix(version, token), bool, wait_s=wait_s)
        if not found:
            raise DeadlineError(f"verifier {self._number}: no staged manifest of weights {version}")
        staged = await read_marker(self._io, found[-1], StagedManifest)
        shards = [shard for shard in staged.shards if self._span.holds(shard.ref.extents)]
        try:
            result = await self._verify(version, shards)
        except CorruptDataError as error:  # the fault of the ranks: the committer reports it
            result = Verification(digests=DigestTable({}, {}), element_sum=0, error=str(error))
        await put_marker(self._io, verified_key(found[-1], self._number), result)

    async def _verify(self, version: int, shards: list[EncodedObject]) -> Verification:
        flat = await self._base(version)
        undo: Undo = []
        await for_each_shard(
            lambda ref: self._take(flat, ref, undo if version else None),
            [shard.ref for shard in shards],
        )
        self._snapshot, self._version, self._shards, self._undo = flat, version, shards, undo
        digests = (
            self._decoder.digest(name, flat.tensors[name], start)
            for name, start in self._span.starts().items()
        )
        return join_verifications(await asyncio.gather(*digests))

    async def _base(self, version: int) -> FlatSnapshot:
        """Return the tensors at the version before; zeros before version 0."""
        # Taken away until all shards are written: threads may outlive a cancelled attempt.
        flat, self._snapshot = self._snapshot, None
        if version == 0:
            return await self._io.offload(FlatSnapshot, self._span.table)
        if flat is not None and self._version == version:
            await self._io.offload(_undo_shards, flat, self._undo)
            return flat
        if flat is not None and self._version == version - 1:
            head = await read_head(self._io.store)
            if await was_committed(self._io.store, version - 1, head, self._shards):
                return flat
        del flat
        if not self._span.table:
            return await self._io.offload(FlatSnapshot, self._span.table)
        span = Extent(self._span.start, self._span.end - self._span.start)
        whole = await read_back_part(self._io, version - 1, [span])
        own = {spec.name: whole.tensors[spec.name] for spec in self._span.table}
        return await self._io.offload(FlatSnapshot.of, own)

    async def _take(self, flat: FlatSnapshot, shard: ShardRef, undo: Undo | None) -> None:
        data = await self._io.get(shard)
        await self._decoder.apply(flat, self._span.within(shard.extents), data, undo)


def _apply_shard(flat: FlatSnapshot, runs: list[Extent], data: bytes, undo: Undo | None) -> None:
    part = flat.part(runs)
    patch = delta.decode(part, data)
    if undo is not None:
        undo.append((runs, Patch(patch.flat_indices, part[patch.flat_indices])))
    flat.overwrite(runs, patch)


def _undo_shards(flat: FlatSnapshot, undo: Undo) -> None:
    for runs, patch in undo:
        flat.overwrite(runs, patch)


def _digest_tensor(name: str, array: np.ndarray, start: int) -> Verification:
    bits = array.view(f"u{array.itemsize}")
    return Verification(digests=make_table({name: array}), element_sum=run_element_sum(start, bits))
