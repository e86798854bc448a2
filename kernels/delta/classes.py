"""Which elements are coded together: classes of base exponents.

Whether a small step changes a bf16 weight depends on the weight's exponent: the smaller the weight,
the finer its grid. The receiver holds the base, so elements are sorted into classes of neighboring
exponents, each of nearly one density, for free. An element's key is its exponent.

```
 key       0 ... 110 │ 111 │ 112 │ 113 ... 255
 changed      41 %   │ 22 %│ 11 %│    3 %             -> four classes, four gap streams
```
"""

from itertools import pairwise

import numpy as np

_CLASS_COST_BITS = 700.0
"""What one more class costs in the header, the table of streams and the entropy tables."""
_SAMPLE_STRIDE = 8


def exponent_keys(bits: np.ndarray) -> np.ndarray:
    """Return the exponents of bfloat16 bit patterns, as uint8 of the same shape."""
    return (bits >> np.uint16(7)).astype(np.uint8)


def choose_thresholds(keys: np.ndarray, changed: np.ndarray, num_classes_max: int) -> list[int]:
    """Cut the keys into classes so that the positions cost the fewest bits.

    Args:
        keys: [N] uint8; a sample of them is counted.
        changed: [K] uint8, the keys of the changed elements.
        num_classes_max: bound of the classes.

    Returns:
        The first key of each class, rising, the first 0.

    """
    sample = keys[::_SAMPLE_STRIDE]
    scale = keys.size / max(1, sample.size)
    hits = np.bincount(changed, minlength=256).astype(np.float64)
    totals = np.maximum(np.bincount(sample, minlength=256) * scale, hits)
    occupied = np.flatnonzero(totals)
    if occupied.size == 0:
        return [0]
    groups = [(int(key), float(totals[key]), float(hits[key])) for key in occupied]
    while len(groups) > 1:
        losses = [_merge_loss(a, b) for a, b in pairwise(groups)]
        index = int(np.argmin(losses))
        if losses[index] > _CLASS_COST_BITS and len(groups) <= num_classes_max:
            break
        first, second = groups[index : index + 2]
        groups[index : index + 2] = [(first[0], first[1] + second[1], first[2] + second[2])]
    return [0, *(group[0] for group in groups[1:])]


def labels_of(keys: np.ndarray, thresholds: list[int]) -> np.ndarray:
    """Return each element's class, uint8 [N]."""
    table = np.zeros(256, np.uint8)
    table[thresholds[1:]] = 1
    return np.take(np.cumsum(table, dtype=np.uint8), keys)


def _merge_loss(first: tuple[int, float, float], second: tuple[int, float, float]) -> float:
    merged = _bits(first[1] + second[1], first[2] + second[2])
    return merged - _bits(first[1], first[2]) - _bits(second[1], second[2])


def _bits(total: float, hits: float) -> float:
    """Entropy of `hits` marks among `total` places."""
    rate = hits / total
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return -total * (rate * np.log2(rate) + (1.0 - rate) * np.log2(1.0 - rate))
