"""Reads some whole tensors of a version back from the store, and says what they are.

Ranks may hold any part of a tensor, but its digest is that of the whole: somebody must see all
of it. A prover does so for its span of tensors: it writes every rank's shards over its copy and
digests that. What is committed is then what the store really holds. It takes one copy of its span,
and what the last shards wrote over: an attempt that comes to nothing is taken back.
"""

import asyncio

import numpy as np

from penstock.actors.sync_relay.core.catalog import NOTHING
from penstock.actors.sync_relay.core.digests import DigestTable, make_table
from penstock.actors.sync_relay.core.flat_snapshot import Image
from penstock.actors.sync_relay.core.head import read_head
from penstock.actors.sync_relay.core.objects import Encoded
from penstock.actors.sync_relay.core.transfer import Sleep, get_patiently, over_shards
from penstock.actors.sync_relay.publish.attempt import (
    Draft,
    Proof,
    await_keys,
    drafts_prefix,
    join_proofs,
    proof_key,
    put_note,
    read_note,
)
from penstock.actors.sync_relay.publish.history import read_back, was_committed
from penstock.actors.sync_relay.publish.shipping import Offload
from penstock.actors.sync_relay.publish.spans import Span
from penstock.kernels import delta
from penstock.kernels.delta import Patch
from penstock.kernels.digest import run_element_sum
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, DeadlineError
from penstock.messages.weights import Extent, ShardRef

Undo = list[tuple[list[Extent], Patch]]
"""What some runs held before."""


class Prover:
    """One a span; beside a rank, or in a process of its own."""

    def __init__(
        self,
        store: ObjectStore,
        number: int,
        span: Span,
        *,
        sleep: Sleep = asyncio.sleep,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            store: the origin.
            number: of the span.
            span: its tensors, of `spans.cut_spans`.
            sleep: waits between attempts.
            offload: runs blocking work.

        """
        self._store = store
        self._number = number
        self._span = span
        self._sleep = sleep
        self._offload = offload
        self._image: Image | None = None
        self._version = NOTHING
        """That the image holds."""
        self._shards: list[Encoded] = []
        """That it was made of."""
        self._undo: Undo = []
        """Back to the version before."""

    async def prove(self, version: int, token: int, *, wait_s: float = 600.0) -> None:
        """Wait for the committer's draft of a version, read its shards, leave the proof.

        Raises:
            DeadlineError: no draft in time.
            DamagedStoreError: the store gives damaged objects, attempt after attempt.
            NotFoundError: the version before is no longer in the store.
            OSError: no room, after several attempts.

        """
        prefix = drafts_prefix(version, token)
        found = await await_keys(self._store, prefix, bool, wait_s=wait_s, sleep=self._sleep)
        if not found:
            raise DeadlineError(f"prover {self._number}: no draft of weights {version}")
        draft = await read_note(self._store, found[-1], Draft, self._sleep)
        shards = [shard for shard in draft.shards if self._span.holds(shard.ref.extents)]
        try:
            proof = await self._prove(version, shards)
        except CorruptDataError as error:  # theirs who made the shards: the committer tells it
            proof = Proof(digests=DigestTable({}, {}), element_sum=0, error=str(error))
        await put_note(self._store, proof_key(found[-1], self._number), proof, self._sleep)

    async def _prove(self, version: int, shards: list[Encoded]) -> Proof:
        image = await self._base(version)
        undo: Undo = []
        await over_shards(
            lambda ref: self._take(image, ref, undo if version else None),
            [shard.ref for shard in shards],
        )
        self._image, self._version, self._shards, self._undo = image, version, shards, undo
        return join_proofs(
            await asyncio.gather(
                *(
                    self._offload(prove_tensor, name, image.tensors[name], start)
                    for name, start in self._span.starts().items()
                )
            )
        )

    async def _base(self, version: int) -> Image:
        """Return the tensors at the version before; zeros before version 0."""
        image, self._image = self._image, None  # threads may go on after an attempt that ended
        if version == 0:
            return await self._offload(Image, self._span.table)
        if image is not None and self._version == version:
            await self._offload(take_back, image, self._undo)
            return image
        if image is not None and self._version == version - 1:
            head = await read_head(self._store)
            if await was_committed(self._store, version - 1, head, self._shards):
                return image
        del image
        whole, _ = await read_back(self._store, version - 1, self._sleep, self._offload)
        own = {spec.name: whole.tensors[spec.name] for spec in self._span.table}
        return await self._offload(Image.of, own)

    async def _take(self, image: Image, shard: ShardRef, undo: Undo | None) -> None:
        data = await get_patiently(self._store, shard, self._sleep)
        await self._offload(write_over, image, self._span.within(shard.extents), data, undo)


def write_over(image: Image, runs: list[Extent], data: bytes, undo: Undo | None) -> None:
    """Write a shard over its base; note what was there before, if someone wants to know.

    Raises:
        CorruptDataError: a shard that was made against another base.

    """
    part = image.part(runs)
    patch = delta.decode(part, data)
    if undo is not None:
        undo.append((runs, Patch(patch.flat_indices, part[patch.flat_indices])))
    image.overwrite(runs, patch)


def take_back(image: Image, undo: Undo) -> None:
    """Write what was there before the last version."""
    for runs, patch in undo:
        image.overwrite(runs, patch)


def prove_tensor(name: str, array: np.ndarray, start: int) -> Proof:
    """Digest one tensor, whose first element is at a flat coordinate."""
    bits = array.view(f"u{array.itemsize}")
    return Proof(digests=make_table({name: array}), element_sum=run_element_sum(start, bits))
