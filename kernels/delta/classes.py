"""Which elements are coded together: classes of base exponents.

Whether a small step changes a weight depends on the weight's exponent: the smaller the weight, the
finer its grid. The receiver holds the base, so elements are sorted into classes of neighboring
exponents, each of nearly one density, for free.

```
 key       0 ... 110 │ 111 │ 112 │ 113 ... 255
 changed      41 %   │ 22 %│ 11 %│    3 %             -> four classes, four series of gaps
```
An element's key is its exponent; its rank in its class is the number of elements of the class
before it.
"""

import math
from itertools import pairwise

import numpy as np

from penstock.kernels.delta.dtypes import Dtype

NUM_CLASSES_MAX = 16
_CLASS_COST_BITS = 120.0
"""What one more class costs in its record and in the first parameters of its series."""


def exponent_keys(bits: np.ndarray, dtype: Dtype = Dtype.BF16) -> np.ndarray:
    """Return the exponents of bit patterns, as uint8 of the same shape."""
    traits = dtype.traits
    shift = bits.dtype.type(traits.key_shift)
    return ((bits >> shift) & bits.dtype.type(traits.num_keys - 1)).astype(np.uint8)


def choose_thresholds(totals: np.ndarray, hits: np.ndarray, scale: float = 1.0) -> list[int]:
    """Cut the keys into classes so that the marks cost the fewest bits.

    Args:
        totals: [num_keys], elements of a sample by key.
        hits: [num_keys], changed elements of the sample by key.
        scale: elements for each one of the sample.

    Returns:
        The first key of each class, rising, the first 0.

    """
    groups = [
        (int(key), float(totals[key]) * scale, float(hits[key]) * scale)
        for key in np.flatnonzero(totals)
    ]
    losses = [_merge_loss(a, b) for a, b in pairwise(groups)]
    while losses and (min(losses) <= _CLASS_COST_BITS or len(groups) > NUM_CLASSES_MAX):
        index = losses.index(min(losses))
        first, second = groups[index : index + 2]
        groups[index : index + 2] = [(first[0], first[1] + second[1], first[2] + second[2])]
        nearby = groups[max(0, index - 1) : index + 2]
        losses[max(0, index - 1) : index + 2] = [_merge_loss(a, b) for a, b in pairwise(nearby)]
    return [0, *(group[0] for group in groups[1:])]


def _merge_loss(first: tuple[int, float, float], second: tuple[int, float, float]) -> float:
    merged = mark_bits(first[1] + second[1], first[2] + second[2])
    return merged - mark_bits(first[1], first[2]) - mark_bits(second[1], second[2])


def mark_bits(total: float, hits: float) -> float:
    """Return the entropy of `hits` marks among `total` places."""
    rate = hits / total if total else 0.0
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return -total * (rate * math.log2(rate) + (1.0 - rate) * math.log2(1.0 - rate))
