"""Reads whole tensors of a version back from the store and digests them, before the commit.

A rank may hold any part of a tensor, but a digest covers the whole tensor, so some process must see
all of it. Each verifier does so for one span of tensors: it applies the shards of all ranks to its
copy and digests the result. The digests are thus those of the data that the store really holds. A
verifier keeps one copy of its span, and the elements that the last shards overwrote, so that it can
undo a failed attempt.
"""

import asyncio
import logging
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

log = logging.getLogger(__name__)

UndoLog = list[tuple[list[Extent], Patch]]
"""Extents and the former values of their changed elements."""


class SpanDecoder:
    """The computation of a verifier, decoding shards and digesting tensors, off the event loop."""

    def __init__(self, offload: Callable[..., Awaitable[Any]]) -> None:
        self._offload = offload

    async def apply(
        self, flat: FlatSnapshot, runs: list[Extent], data: bytes, undo: UndoLog | None
    ) -> None:
        """Apply a shard to its base, and append the former values to `undo`.

        Raises:
            CorruptDataError: The shard was encoded against another base.

        """
        await self._offload(_apply_shard, flat, runs, data, undo)

    async def digest(self, name: str, array: np.ndarray, start: int) -> Verification:
        """Return the digests of one tensor, whose first element is at flat coordinate `start`."""
        return await self._offload(_digest_tensor, name, array, start)


class SpanVerifier:
    """The verifier of one span; it runs next to a rank or in a separate process."""

    def __init__(
        self, io: StoreIO, number: int, span: Span, *, decoder: SpanDecoder | None = None
    ) -> None:
        """Initialize without reading anything.

        Args:
            io: Origin store.
            number: Index of the span.
            span: Tensors to verify, from `spans.cut_spans`.
            decoder: Decoder of shards; by default it runs on `io.offload`.

        """
        self._io = io
        self._number = number
        self._span = span
        self._decoder = decoder or SpanDecoder(io.offload)
        self._snapshot: FlatSnapshot | None = None
        self._version = NOTHING
        """Version of the snapshot."""
        self._shards: list[EncodedObject] = []
        """Shards that were applied for this version."""
        self._undo: UndoLog = []
        """Former values that restore the version before."""

    async def verify(self, version: int, token: int, *, wait_s: float = 600.0) -> None:
        """Wait for the staged manifest of a version, read its shards and store the verification.

        Raises:
            DeadlineError: No manifest was staged in time.
            DamagedStoreError: Objects were damaged or missing in every attempt.
            NotFoundError: The version before is no longer in the store.
            OSError: The store has no room, after several attempts.

        """
        found = await await_keys(self._io, staged_prefix(version, token), bool, wait_s=wait_s)
        if not found:
            raise DeadlineError(
                f"verifier {self._number}: no manifest of weights {version} was staged in"
                f" {wait_s:g} s"
            )
        # The key contains the manifest's hash, and so does the key of the result: a result never
        # counts for another manifest.
        staged = await read_marker(self._io, found[-1], StagedManifest)
        shards = [shard for shard in staged.shards if self._span.holds(shard.ref.extents)]
        try:
            result = await self._verify(version, shards)
        except CorruptDataError as error:
            # Ranks uploaded shards that do not fit. The committer reports it for all verifiers.
            log.warning("verifier %d: weights %d: %s", self._number, version, error)
            result = Verification(digests=DigestTable({}, {}), element_sum=0, error=str(error))
        await put_marker(self._io, verified_key(found[-1], self._number), result)

    async def _verify(self, version: int, shards: list[EncodedObject]) -> Verification:
        flat = await self._base(version)
        undo: UndoLog = []
        await for_each_shard(
            # Version 0 needs no undo: its base is zeros.
            lambda ref: self._apply(flat, ref, undo if version else None),
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
        # Threads of a cancelled attempt may still write to the snapshot, so it is not available
        # again until all shards are written.
        flat, self._snapshot = self._snapshot, None
        if version == 0:
            return await self._io.offload(FlatSnapshot, self._span.table)
        # A repeated attempt at the same version: take the shards of the failed one back.
        if flat is not None and self._version == version:
            await self._io.offload(_undo_shards, flat, self._undo)
            return flat
        # The version before is a valid base only if the shards applied here were those committed.
        if flat is not None and self._version == version - 1:
            head = await read_head(self._io.store)
            if await was_committed(self._io.store, version - 1, head, self._shards):
                return flat
        # Freed before the version is read back, which needs the memory.
        del flat
        if not self._span.table:
            return await self._io.offload(FlatSnapshot, self._span.table)
        span = Extent(self._span.start, self._span.end - self._span.start)
        whole = await read_back_part(self._io, version - 1, [span])
        tensors = {spec.name: whole.tensors[spec.name] for spec in self._span.table}
        return await self._io.offload(FlatSnapshot.of, tensors)

    async def _apply(self, flat: FlatSnapshot, shard: ShardRef, undo: UndoLog | None) -> None:
        data = await self._io.get(shard)
        await self._decoder.apply(flat, self._span.within(shard.extents), data, undo)


def _apply_shard(flat: FlatSnapshot, runs: list[Extent], data: bytes, undo: UndoLog | None) -> None:
    part = flat.part(runs)
    patch = delta.decode(part, data)
    # Recorded before the write: only the changed elements, and not a second copy of the span.
    if undo is not None:
        undo.append((runs, Patch(patch.flat_indices, part[patch.flat_indices])))
    flat.overwrite(runs, patch)


def _undo_shards(flat: FlatSnapshot, undo: UndoLog) -> None:
    for runs, patch in undo:
        flat.overwrite(runs, patch)


def _digest_tensor(name: str, array: np.ndarray, start: int) -> Verification:
    bits = array.view(f"u{array.itemsize}")
    return Verification(digests=make_table({name: array}), element_sum=run_element_sum(start, bits))
