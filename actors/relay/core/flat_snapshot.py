"""A complete snapshot in memory, addressed by flat coordinates that are the same for all copies.

```
 table:        a [2,3] bf16   b [4] bf16   c [5] fp32        rows by dtype, then name
 coordinates:  0 ........ 5   6 ..... 9    10 .... 14        one arena of memory per dtype
 shards:       [ 0 .......... 7 ]  [ 8 9 ]  [ 10 .. 14 ]     any partition; one dtype each
```
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Self

import msgspec
import numpy as np
import xxhash

from penstock.actors.policy.snapshot import Snapshot
from penstock.kernels.delta import Patch
from penstock.kernels.digest import root_digest
from penstock.kernels.element_types import TensorSpec, element_type_of
from penstock.messages.errors import CorruptDataError
from penstock.messages.weights import Extent

SHARD_ELEMENTS_MAX = 16 << 20
"""Largest number of elements per shard: 32 MiB of bf16 before encoding."""


Table = tuple[TensorSpec, ...]


def tensor_table(snapshot: Snapshot) -> Table:
    """Return the specs of a snapshot's tensors in the order of flat coordinates.

    Raises:
        ValueError: A tensor has a dtype without a codec.

    """
    rows: list[TensorSpec] = []
    for name, array in snapshot.items():
        try:
            rows.append(TensorSpec(name, element_type_of(array), array.shape))
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from error
    return tuple(sorted(rows, key=lambda spec: (spec.dtype, spec.name)))


def table_digest(table: Table) -> str:
    """Return the digest of a table; equal digests mean equal flat coordinates."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(table))


def cut(table: Table, num_elements_max: int = SHARD_ELEMENTS_MAX) -> list[Extent]:
    """Cut a snapshot into shards of one dtype and at most `num_elements_max` elements each."""
    shards: list[Extent] = []
    start = 0
    for _, specs in groupby(table, key=lambda spec: spec.dtype):
        end = start + sum(spec.size for spec in specs)
        steps = range(start, end, num_elements_max)
        shards += [Extent(at, min(num_elements_max, end - at)) for at in steps]
        start = end
    return shards


def dtype_at(table: Table, place: int) -> str:
    """Return the dtype of the element at a flat coordinate.

    Raises:
        ValueError: The coordinate is outside the snapshot.

    """
    end = 0
    for spec in table:
        end += spec.size
        if place < end:
            return spec.dtype
    raise ValueError(f"weights: element {place} is outside the snapshot of {end} elements")


def flat_coordinates(extents: Sequence[Extent], indices: np.ndarray) -> np.ndarray:
    """Return flat coordinates, [K] int64, of indices into concatenated extents, [K]."""
    begins = np.cumsum([0, *(extent.num_elements for extent in extents)])
    shifts = np.array([extent.start for extent in extents]) - begins[:-1]
    # The usual case: a publisher's shards are single runs, and a lookup per element would be slow.
    if len(extents) == 1:
        return np.add(indices, shifts[0], dtype=np.int64)
    return indices + shifts[np.searchsorted(begins, indices, side="right") - 1]


class FlatSnapshot:
    """A snapshot whose tensors are views of one flat arena per dtype."""

    def __init__(self, table: Table) -> None:
        """Allocate zeroed arenas.

        Raises:
            ValueError: A tensor has a dtype without a codec.

        """
        self.table = table
        self.tensors: Snapshot = {}
        self._arenas: list[tuple[int, np.ndarray]] = []
        self._ends = np.cumsum([spec.size for spec in table], dtype=np.int64)
        start = 0
        for _, specs in groupby(table, key=lambda spec: spec.dtype):
            arena = self._lay_out(list(specs))
            self._arenas.append((start, arena))
            start += arena.size

    def _lay_out(self, specs: list[TensorSpec]) -> np.ndarray:
        storage = specs[0].element_type.storage
        arena = np.zeros(sum(spec.size for spec in specs), f"u{storage.itemsize}")
        ends = np.cumsum([spec.size for spec in specs])
        for spec, part in zip(specs, np.split(arena, ends[:-1]), strict=True):
            self.tensors[spec.name] = part.view(storage).reshape(spec.shape)
        return arena

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Return a flat copy of a snapshot."""
        flat = cls(tensor_table(snapshot))
        for name, array in snapshot.items():
            flat.tensors[name][...] = array
        return flat

    def copy(self) -> "FlatSnapshot":
        """Return a copy with its own memory."""
        twin = FlatSnapshot(self.table)
        for (_, to), (_, arena) in zip(twin._arenas, self._arenas, strict=True):
            to[...] = arena
        return twin

    def digest(self) -> str:
        """Return the root digest over all tensors."""
        return root_digest(self.tensors)

    @property
    def num_params(self) -> int:
        """Number of elements."""
        return sum(arena.size for _, arena in self._arenas)

    def part(self, extents: Sequence[Extent]) -> np.ndarray:
        """Return the elements of some extents, [N]; a single extent gives a view.

        Raises:
            CorruptDataError: The extents are outside the snapshot or of several dtypes.

        """
        runs = [self._run(extent) for extent in extents]
        if not runs or len({run.dtype for run in runs}) > 1:
            raise CorruptDataError("weights: expected the extents of a shard to have one dtype")
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    def overwrite(self, extents: Sequence[Extent], patch: Patch) -> np.ndarray:
        """Apply a patch of `part(extents)`; return the flat coordinates it wrote, [K]."""
        touched = flat_coordinates(extents, patch.flat_indices)
        start, arena = next(pair for pair in reversed(self._arenas) if pair[0] <= extents[0].start)
        arena[touched - start] = patch.values
        return touched

    def patches(self, touched: Iterable[np.ndarray]) -> dict[str, Patch]:
        """Return the current values at flat coordinates, as one patch per tensor."""
        places = np.unique(np.concatenate([np.zeros(0, np.int64), *touched]))
        by_tensor = np.split(places, np.searchsorted(places, self._ends[:-1]))
        patches: dict[str, Patch] = {}
        for spec, end, in_tensor in zip(self.table, self._ends, by_tensor, strict=True):
            if in_tensor.size:
                local = in_tensor - (end - spec.size)
                patches[spec.name] = Patch(local, self.tensors[spec.name].reshape(-1)[local])
        return patches

    def _run(self, extent: Extent) -> np.ndarray:
        for start, arena in self._arenas:
            at = extent.start - start
            if 0 <= at < arena.size and 0 < extent.num_elements <= arena.size - at:
                return arena[at : at + extent.num_elements]
        raise CorruptDataError(f"weights: {extent} is outside the snapshot, or crosses dtypes")
