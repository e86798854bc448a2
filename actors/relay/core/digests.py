"""Digests of tensors and tiles, which locate damage, and the element digest of a whole snapshot.

```
 root ── sum of ── tensor digests ── each over ── tiles of 65,536 elements
```
Every version has a table of these digests. It is read only when a root digest is wrong, and shows
which tiles must be fetched again. The element digest is a sum over elements: it adds up over any
partition of a snapshot, and updating it costs only the changed elements. Ranks can therefore check
a snapshot that no single process holds.
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
"""Number of elements per tile; the last tile of a tensor may be shorter."""
_DIGEST_BYTES = 8
"""Size of a tile's digest."""
SUM_MODULUS = 1 << 64
"""Modulus of element digests."""


class DigestTable(msgspec.Struct, frozen=True):
    """Digests of the tensors and tiles of one version."""

    tensors: dict[str, bytes]
    """Tensor -> xxh3-128."""
    tiles: dict[str, bytes]
    """Tensor -> concatenated xxh3-64 of its tiles."""

    def root_digest(self) -> str:
        """Return the root digest that follows from the tensors' digests."""
        parts = (named_digest(n, int.from_bytes(d, "big")) for n, d in self.tensors.items())
        return f"{sum(parts) % (1 << 128):032x}"

    def damaged_tiles(self, tensors: dict[str, np.ndarray]) -> list[TileRef]:
        """Return the tiles that differ from this table."""
        damaged: list[TileRef] = []
        for name, array in tensors.items():
            # Damage is rare: one digest per tensor rules out most of them before any tile is read.
            if tensor_digest(array).to_bytes(16, "big") == self.tensors.get(name):
                continue
            expected = self.tiles.get(name, b"")
            found = _tile_digests(array)
            damaged += [
                TileRef(name, at // _DIGEST_BYTES)
                for at in range(0, len(found), _DIGEST_BYTES)
                if found[at : at + _DIGEST_BYTES] != expected[at : at + _DIGEST_BYTES]
            ]
        return damaged

    def is_tile(self, ref: TileRef, data: bytes) -> bool:
        """Return whether these bytes are the contents of a tile."""
        at = ref.tile * _DIGEST_BYTES
        expected = self.tiles.get(ref.tensor, b"")[at : at + _DIGEST_BYTES]
        return xxhash.xxh3_64_digest(data) == expected


def make_table(tensors: dict[str, np.ndarray]) -> DigestTable:
    """Return the digests of all tensors and tiles."""
    return DigestTable(
        tensors={name: tensor_digest(a).to_bytes(16, "big") for name, a in tensors.items()},
        tiles={name: _tile_digests(a) for name, a in tensors.items()},
    )


def join_tables(parts: Iterable[DigestTable]) -> DigestTable:
    """Return one table from tables of different tensors."""
    tables = list(parts)
    return DigestTable(
        tensors={name: digest for part in tables for name, digest in part.tensors.items()},
        tiles={name: tiles for part in tables for name, tiles in part.tiles.items()},
    )


def decode_table(data: bytes, root_digest: str) -> DigestTable:
    """Decode a table and check it against a root digest.

    Raises:
        CorruptDataError: The data is not a table, or not the table of this root digest.

    """
    try:
        table = parse_msgpack(data, DigestTable, "table")
    except ValueError as error:
        raise CorruptDataError(f"weights: not a table of digests: {error}") from error
    if table.root_digest() != root_digest:
        raise CorruptDataError(
            f"weights: expected the table of root digest {root_digest}, got {table.root_digest()}"
        )
    return table


def tile_bytes(array: np.ndarray, tile: int) -> np.ndarray:
    """Return one tile of a contiguous array as a view of bytes, writable if the array is."""
    return array.reshape(-1)[tile * TILE_ELEMENTS : (tile + 1) * TILE_ELEMENTS].view(np.uint8)


def _tile_digests(array: np.ndarray) -> bytes:
    num_tiles = -(-array.size // TILE_ELEMENTS)
    return b"".join(xxhash.xxh3_64_digest(tile_bytes(array, n).data) for n in range(num_tiles))


def add_to_digest(digest: str, change: int) -> str:
    """Return an element digest after a change of its sum; an empty digest is zero."""
    return f"{(int(digest or '0', 16) + change) % SUM_MODULUS:016x}"
