"""A whole snapshot in memory, as the few flat arrays that deltas are made of.

Tensors are laid out in the order of their names, neighbors of one dtype sharing a shard, so that
publisher, relays and receivers agree on every flat index without a word.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Self

import msgspec
import numpy as np

from penstock.actors.runtime.snapshots import Snapshot
from penstock.kernels.delta import Patch
from penstock.kernels.digest import root_digest

SHARD_ELEMENTS_MAX = 16 << 20
"""Tensors share a shard up to this size; a larger one has a shard of its own."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One row of the tensor table."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def tensor_table(snapshot: Snapshot) -> tuple[TensorSpec, ...]:
    """Describe a snapshot's tensors, in the order of their names."""
    return tuple(
        TensorSpec(name, array.dtype.str, array.shape) for name, array in sorted(snapshot.items())
    )


class Image:
    """A snapshot's tensors as views of its shards."""

    def __init__(self, table: tuple[TensorSpec, ...]) -> None:
        """Lay out zeroed shards.

        Raises:
            ValueError: a dtype whose elements are not of 1, 2 or 4 bytes.

        """
        self.table = table
        self.groups = list(_shard_groups(table))
        self.shards = [_empty_shard(group) for group in self.groups]
        self.tensors: Snapshot = {}
        for group, shard in zip(self.groups, self.shards, strict=True):
            for spec, part in zip(group, np.split(shard, _ends(group)[:-1]), strict=True):
                self.tensors[spec.name] = part.view(spec.dtype).reshape(spec.shape)

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Copy a snapshot."""
        image = cls(tensor_table(snapshot))
        for name, array in snapshot.items():
            image.tensors[name][...] = array
        return image

    def copy(self) -> "Image":
        """Copy all shards."""
        twin = Image(self.table)
        for to, shard in zip(twin.shards, self.shards, strict=True):
            to[...] = shard
        return twin

    def digest(self) -> str:
        """Return the root digest over all tensors."""
        return root_digest(self.tensors)

    @property
    def num_params(self) -> int:
        """Return the number of elements."""
        return sum(shard.size for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole snapshot."""
        return sum(shard.nbytes for shard in self.shards)

    def changes_since(self, base: "Image") -> dict[str, Patch]:
        """Return what turns `base`, of the same table, into this image, by tensor."""
        patches: dict[str, Patch] = {}
        for group, old, new in zip(self.groups, base.shards, self.shards, strict=True):
            where = np.flatnonzero(old != new)
            ends = _ends(group)
            cuts = np.searchsorted(where, ends)
            for spec, end, part in zip(group, ends, np.split(where, cuts[:-1]), strict=True):
                if part.size:
                    values = new[part].view(spec.dtype)
                    patches[spec.name] = Patch(part - (end - spec.size), values)
        return patches


def _shard_groups(table: tuple[TensorSpec, ...]) -> Iterable[list[TensorSpec]]:
    for _, specs in groupby(table, key=lambda spec: spec.dtype):
        group: list[TensorSpec] = []
        for spec in specs:
            if group and sum(s.size for s in group) + spec.size > SHARD_ELEMENTS_MAX:
                yield group
                group = []
            group.append(spec)
        yield group


def _empty_shard(group: list[TensorSpec]) -> np.ndarray:
    itemsize = np.dtype(group[0].dtype).itemsize
    if itemsize not in _UNSIGNED:
        raise ValueError(f"tensor {group[0].name}: dtype {group[0].dtype} has no delta codec")
    return np.zeros(sum(spec.size for spec in group), _UNSIGNED[itemsize])


def _ends(group: list[TensorSpec]) -> np.ndarray:
    return np.cumsum([spec.size for spec in group])
