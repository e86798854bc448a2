"""Digests of tensors and tiles, which locate damage, and one sum over all elements.

```
 root ── sum of ── tensor digests ── each over ── its tiles of 65,536 elements
```
A table of them comes with every version. It is read only when a root digest is wrong, and shows
which tiles to fetch again. The element digest adds up over any cut of a snapshot, and follows an
update at the cost of its changed elements: ranks compare what they hold without gathering it.
"""

from collections.abc import Iterable

import msgspec
import numpy as np
import xxhash

from penstock.kernels.digest import named_digest, tensor_digest
from penstock.messages.errors import CorruptDataError
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.weights import TileRef

TILE_ELEMENTS = 64 << 10
_TILE_BYTES = 8
SUM_MODULUS = 1 << 64
"""Modulus of element digests."""


class DigestTable(msgspec.Struct, frozen=True):
    """Digests of the tensors and tiles of one version."""

    tensors: dict[str, bytes]
    """xxh3-128 of each tensor."""
    tiles: dict[str, bytes]
    """xxh3-64 of each tile, one after the other."""

    def root_digest(self) -> str:
        """Return the root digest that these tensors have."""
        parts = (named_digest(n, int.from_bytes(d, "big")) for n, d in self.tensors.items())
        return f"{sum(parts) % (1 << 128):032x}"

    def damaged_tiles(self, tensors: dict[str, np.ndarray]) -> list[TileRef]:
        """Compare tensors, then the tiles of those that differ."""
        damaged: list[TileRef] = []
        for name, array in tensors.items():
            if tensor_digest(array).to_bytes(16, "big") == self.tensors.get(name):
                continue
            expected = self.tiles.get(name, b"")
            found = _tile_digests(array)
            damaged += [
                TileRef(name, at // _TILE_BYTES)
                for at in range(0, len(found), _TILE_BYTES)
                if found[at : at + _TILE_BYTES] != expected[at : at + _TILE_BYTES]
            ]
        return damaged

    def is_tile(self, ref: TileRef, data: bytes) -> bool:
        """Check whether these are the bytes of a tile."""
        at = ref.tile * _TILE_BYTES
        expected = self.tiles.get(ref.tensor, b"")[at : at + _TILE_BYTES]
        return xxhash.xxh3_64_digest(data) == expected


def make_table(tensors: dict[str, np.ndarray]) -> DigestTable:
    """Digest every tensor and tile."""
    return DigestTable(
        tensors={name: tensor_digest(a).to_bytes(16, "big") for name, a in tensors.items()},
        tiles={name: _tile_digests(a) for name, a in tensors.items()},
    )


def join_tables(parts: Iterable[DigestTable]) -> DigestTable:
    """Join tables of different tensors."""
    tables = list(parts)
    return DigestTable(
        tensors={name: digest for part in tables for name, digest in part.tensors.items()},
        tiles={name: tiles for part in tables for name, tiles in part.tiles.items()},
    )


def decode_table(data: bytes, root_digest: str) -> DigestTable:
    """Read a table.

    Raises:
        CorruptDataError: Not a table, or not that of the version with this root digest.

    """
    try:
        table = parse_msgpack(data, DigestTable, "table")
    except ValueError as error:
        raise CorruptDataError(f"weights: not a table of digests: {error}") from error
    if table.root_digest() != root_digest:
        raise CorruptDataError(f"weights: the table of digests is not that of {root_digest}")
    return table


def tile_bytes(array: np.ndarray, tile: int) -> np.ndarray:
    """View one tile of a contiguous array as bytes, writable where the array is."""
    return array.reshape(-1)[tile * TILE_ELEMENTS : (tile + 1) * TILE_ELEMENTS].view(np.uint8)


def _tile_digests(array: np.ndarray) -> bytes:
    num_tiles = -(-array.size // TILE_ELEMENTS)
    return b"".join(xxhash.xxh3_64_digest(tile_bytes(array, n).data) for n in range(num_tiles))


def add_to_digest(digest: str, change: int) -> str:
    """Return an element digest after a change of its sum; the empty one is zero."""
    return f"{(int(digest or '0', 16) + change) % SUM_MODULUS:016x}"
