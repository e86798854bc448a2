"""Which elements are coded together: classes of base exponents.

Whether a small step changes a bf16 weight depends on the weight's exponent: the smaller the weight,
the finer its grid. The receiver holds the base, so elements are sorted into classes of neighboring
exponents, each of nearly one density, for free. An element's key is its exponent.

```
 key       0 ... 110 │ 111 │ 112 │ 113 ... 255
 changed      41 %   │ 22 %│ 11 %│    3 %             -> four classes, four gap streams
```
Within its class an element's rank goes by tile of 65,536 elements, then by key, then by place: so
one stable sort of a tile's keys, which stays in the cache, gives all the ranks of the tile.
"""

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np

TILE_ELEMENTS = 1 << 16
NUM_KEYS = 256
_CLASS_COST_BITS = 1600.0
"""What one more class costs in the header, the table of streams and the entropy tables."""


def exponent_keys(bits: np.ndarray) -> np.ndarray:
    """Return the exponents of bfloat16 bit patterns, as uint8 of the same shape."""
    return (bits >> np.uint16(7)).astype(np.uint8)


def key_counts(keys: np.ndarray) -> np.ndarray:
    """Return how often each key occurs in each tile, int64 [T, 256]."""
    starts = range(0, keys.size, TILE_ELEMENTS)
    tiles = [np.bincount(keys[s : s + TILE_ELEMENTS], minlength=NUM_KEYS) for s in starts]
    return np.array(tiles, np.int64).reshape(len(starts), NUM_KEYS)


def choose_thresholds(totals: np.ndarray, hits: np.ndarray, num_classes_max: int) -> list[int]:
    """Cut the keys into classes so that the marks cost the fewest bits.

    Args:
        totals: [256], elements by key.
        hits: [256], changed elements by key.
        num_classes_max: bound of the classes.

    Returns:
        The first key of each class, rising, the first 0.

    """
    groups = [(int(key), float(totals[key]), float(hits[key])) for key in np.flatnonzero(totals)]
    while len(groups) > 1:
        losses = [_merge_loss(a, b) for a, b in pairwise(groups)]
        index = int(np.argmin(losses))
        if losses[index] > _CLASS_COST_BITS and len(groups) <= num_classes_max:
            break
        first, second = groups[index : index + 2]
        groups[index : index + 2] = [(first[0], first[1] + second[1], first[2] + second[2])]
    return [0, *(group[0] for group in groups[1:])]


class Grouping:
    """The elements of one base by class and rank."""

    def __init__(self, keys: np.ndarray, counts: np.ndarray, thresholds: list[int]) -> None:
        self._keys = keys
        self._counts = np.add.reduceat(counts, thresholds, axis=1)
        self._num_classes = len(thresholds)

    @property
    def populations(self) -> list[int]:
        """Return the number of elements of each class."""
        return self._counts.sum(axis=0).tolist()

    def ranks(self, is_marked: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, by class, the ranks (rising) and the places of the marked elements.

        Args:
            is_marked: bool [N].

        """
        ranks: list[list[np.ndarray]] = [[] for _ in range(self._num_classes)]
        places: list[list[np.ndarray]] = [[] for _ in range(self._num_classes)]
        for tile in self._tiles():
            own = is_marked[tile.start : tile.start + tile.order.size]
            slots = np.flatnonzero(own[tile.order])
            cuts = np.searchsorted(slots, tile.bounds)
            found = tile.order[slots] + tile.start
            for number, (first, end) in enumerate(pairwise(cuts)):
                ranks[number].append(slots[first:end] + tile.shifts[number])
                places[number].append(found[first:end])
        return [(_joined(r), _joined(p)) for r, p in zip(ranks, places, strict=True)]

    def places(self, ranks: list[np.ndarray]) -> list[np.ndarray]:
        """Return, by class, the places of the elements of the given ranks (rising)."""
        cuts = self._rank_cuts(ranks)
        places: list[list[np.ndarray]] = [[] for _ in ranks]
        for number, tile in enumerate(self._tiles()):
            for label, own in enumerate(ranks):
                part = own[cuts[label][number] : cuts[label][number + 1]]
                places[label].append(tile.order[part - tile.shifts[label]] + tile.start)
        return [_joined(parts) for parts in places]

    def _rank_cuts(self, ranks: list[np.ndarray]) -> list[np.ndarray]:
        """Return, by class, where the ranks of each tile begin and end."""
        ends = np.cumsum(self._counts, axis=0)
        return [
            np.concatenate(([0], np.searchsorted(own, ends[:, label])))
            for label, own in enumerate(ranks)
        ]

    def _tiles(self) -> Iterator["_Tile"]:
        seen = np.zeros(self._num_classes, np.int64)
        for number, counts in enumerate(self._counts):
            start = number * TILE_ELEMENTS
            order = np.argsort(self._keys[start : start + TILE_ELEMENTS], kind="stable")
            bounds = np.concatenate(([0], np.cumsum(counts)))
            yield _Tile(start, order, bounds, seen - bounds[:-1])
            seen = seen + counts


class _Tile(msgspec.Struct, frozen=True):
    start: int
    order: np.ndarray
    """Places in the tile, sorted by key."""
    bounds: np.ndarray
    """[C+1]: where each class begins in `order`."""
    shifts: np.ndarray
    """[C]: slot in `order` + shift = rank in the class."""


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _merge_loss(first: tuple[int, float, float], second: tuple[int, float, float]) -> float:
    merged = _bits(first[1] + second[1], first[2] + second[2])
    return merged - _bits(first[1], first[2]) - _bits(second[1], second[2])


def _bits(total: float, hits: float) -> float:
    """Entropy of `hits` marks among `total` places."""
    rate = hits / total
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return -total * (rate * np.log2(rate) + (1.0 - rate) * np.log2(1.0 - rate))
