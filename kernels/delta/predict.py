"""The choice of codec and classes, from a sample: it costs a small share of encoding.

The marks and signs of the step codecs are predicted by their entropy, class by class; the sizes of
steps by their lengths in bits; the mask and the byte planes of raw and xor by packing them.

Elements are grouped into classes by exponent: whether a small step changes a weight depends on the
weight's exponent (the smaller the weight, the finer its grid), and the receiver holds the base. So
classes of neighboring exponents, each of nearly one density, cost next to nothing.

```
 key       0 ... 110 │ 111 │ 112 │ 113 ... 255
 changed      41 %   │ 22 %│ 11 %│    3 %             -> four classes, four series of gaps
```
An element's key is its exponent; its rank in its class is the number of elements of the class
before it.
"""

import math
from itertools import pairwise

import msgspec
import numpy as np

from penstock.kernels.delta.compiled import tally
from penstock.kernels.delta.container import compress
from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import NUM_CLASSES_MAX, Codec
from penstock.kernels.delta.portable import SMALLEST_LARGE, steps_between

_CLASS_COST_BITS = 120.0
"""Cost of one more class in its record and in the first parameters of its series."""
_BLOCK = 256
_SAMPLE_MAX = 1 << 16
_PLANES_FROM_SHARE = 1 / 8
"""Planes are tried if steps take this share of the array; below it, they never win."""
_SIZE_EXTRA_BITS = 1.5
"""Overhead of a Rice code over the length of its number."""


class CodecChoice(msgspec.Struct, frozen=True):
    """The codec of the fewest predicted bits, and its classes."""

    codec: Codec
    thresholds: list[int]


def choose_codec(base: np.ndarray, target: np.ndarray, dtype: Dtype) -> CodecChoice:
    """Predict sizes on a sample of [N] elements that are not all equal, and choose."""
    sample = _sample(base), _sample(target)
    bits: dict[Codec, float] = {}
    thresholds = [0]
    if dtype.traits.has_steps:
        counts = tally(*sample, dtype)
        thresholds = _thresholds(counts, base.size)
        bits = _step_bits(*sample, dtype, counts, thresholds)
    if min(bits.values(), default=math.inf) > _PLANES_FROM_SHARE * 8 * sample[0].nbytes:
        bits[Codec.XOR_ZSTD] = _plane_bits(sample[0] ^ sample[1])
        bits[Codec.RAW] = _plane_bits(sample[1])
    codec = min(bits, key=lambda codec: (bits[codec], codec is not Codec.RAW))
    return CodecChoice(codec, thresholds if codec is Codec.CLASS_GAP_ULP else [0])


def class_thresholds(base: np.ndarray, target: np.ndarray, dtype: Dtype) -> list[int]:
    """Return the first keys of the classes, going by a sample of [N] elements."""
    return _thresholds(tally(_sample(base), _sample(target), dtype), base.size)


def _thresholds(counts: np.ndarray, num_elements: int) -> list[int]:
    if counts.shape[1] == 1:
        return [0]
    scale = num_elements / max(1, int(counts.sum()))
    return choose_thresholds(counts.sum(axis=0), counts[1], scale)


def _sample(array: np.ndarray) -> np.ndarray:
    """Return blocks from all over the array; an odd stride meets all columns of a matrix."""
    if array.size <= _SAMPLE_MAX:
        return array
    stride = (array.size // _SAMPLE_MAX) | 1
    blocks = array[: array.size // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return blocks[::stride].reshape(-1)


def _step_bits(
    base: np.ndarray, target: np.ndarray, dtype: Dtype, counts: np.ndarray, thresholds: list[int]
) -> dict[Codec, float]:
    is_changed = base != target
    where = np.flatnonzero(is_changed)
    _, sizes = steps_between(base[where], target[where], dtype)
    large = sizes[sizes >= SMALLEST_LARGE].astype(np.float64)
    steps = where.size + mark_bits(where.size, large.size)
    steps += float(np.sum(np.log2(large) + _SIZE_EXTRA_BITS))
    bits = {
        Codec.GAP_ULP: steps + mark_bits(base.size, where.size),
        Codec.BITMASK_ULP: steps + _plane_bits(np.packbits(is_changed)),
    }
    if len(thresholds) > 1:
        by_class = np.add.reduceat(counts, thresholds, axis=1)
        totals, hits = by_class.sum(axis=0), by_class[1]
        marks = sum(mark_bits(t, h) for t, h in zip(totals, hits, strict=True))
        bits[Codec.CLASS_GAP_ULP] = steps + marks
    return bits


def _plane_bits(array: np.ndarray) -> float:
    """Return the bits of an array's byte planes under zstd."""
    planes = array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()
    return 8.0 * min(len(compress(planes)), len(planes))


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
