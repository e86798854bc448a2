"""Encoding, decoding and applying deltas, with the codec of the smallest predicted size.

```
 nothing changed ──▶ equal        sample ──▶ predicted bits of each ──▶ class_gap_ulp │ gap_ulp │
                                                           bitmask_ulp │ xor_zstd │ raw
```

Codec and classes are chosen from a sample, which takes a small part of the encoding time. For the
step codecs, the size of marks and signs is predicted from their entropy per class, and the size of
steps from their lengths in bits. The mask of bitmask_ulp and the byte planes of xor_zstd and raw
are compressed to measure their size.

Elements are grouped into classes by exponent. Whether a small step changes a weight depends on its
exponent, because the grid of smaller weights is finer; and the receiver knows the exponents,
because it has the base. Classes of neighboring exponents with similar densities of changes
therefore save bits at almost no cost.

```
 key       0 ... 110 │ 111 │ 112 │ 113 ... 255
 changed      41 %   │ 22 %│ 11 %│    3 %             -> four classes, four series of gaps
```
The key of an element is its exponent. Its rank is the number of earlier elements in its class.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import numpy as np

from penstock.kernels.delta.arrays import (
    Patch,
    check_of,
    check_out,
    check_pair,
    join_nibbles,
    patch_between,
)
from penstock.kernels.delta.compiled import apply_steps, decode_steps, encode_steps, tally
from penstock.kernels.delta.container import compress, pack, plain_body, unpack
from penstock.kernels.delta.dtypes import Dtype, pack_nibbles, unpack_nibbles
from penstock.kernels.delta.header import NUM_CLASSES_MAX, Codec, Header
from penstock.kernels.delta.portable import SMALLEST_LARGE, steps_between
from penstock.messages.errors import CorruptDataError

# Cost in bits of another class: its record and the first Rice parameters of its series.
_CLASS_COST_BITS = 120.0
_BLOCK = 256
# Maximum number of sampled elements. Half as many change payloads by -0.4% to +0.1%.
_SAMPLE_MAX = 1 << 16
# Predicted size of the step codecs, as a fraction of the array, from which byte planes are tried;
# below it they never win.
_PLANES_FROM_SHARE = 1 / 8
# Mean overhead in bits of a Rice code over the length of its number.
_SIZE_EXTRA_BITS = 1.5


class CodecChoice(msgspec.Struct, frozen=True):
    """Codec with the smallest predicted size, and the first keys of its classes."""

    codec: Codec
    thresholds: list[int]


def choose_codec(base: np.ndarray, target: np.ndarray, dtype: Dtype) -> CodecChoice:
    """Choose the codec with the smallest size, predicted from a sample of arrays [N]."""
    sample = _sample(base), _sample(target)
    bits: dict[Codec, float] = {}
    thresholds = [0]
    if dtype.traits.has_steps:
        counts = tally(*sample, dtype)
        thresholds = _thresholds(counts, base.size)
        bits = _step_bits(*sample, dtype, counts, thresholds)
    # The size of planes is known only after compressing them, so they are only tried where they
    # can win.
    if min(bits.values(), default=math.inf) > _PLANES_FROM_SHARE * 8 * sample[0].nbytes:
        bits[Codec.XOR_ZSTD] = _plane_bits(sample[0] ^ sample[1])
        bits[Codec.RAW] = _plane_bits(sample[1])
    # On a tie, the codec that needs no base wins.
    codec = min(bits, key=lambda codec: (bits[codec], codec is not Codec.RAW))
    return CodecChoice(codec, thresholds if codec is Codec.CLASS_GAP_ULP else [0])


def class_thresholds(base: np.ndarray, target: np.ndarray, dtype: Dtype) -> list[int]:
    """Return the first keys of the classes, chosen from a sample of arrays [N]."""
    return _thresholds(tally(_sample(base), _sample(target), dtype), base.size)


def _thresholds(counts: np.ndarray, num_elements: int) -> list[int]:
    if counts.shape[1] == 1:
        return [0]
    scale = num_elements / max(1, int(counts.sum()))
    return choose_thresholds(counts.sum(axis=0), counts[1], scale)


def _sample(array: np.ndarray) -> np.ndarray:
    """Return a sample of blocks from all parts of an array."""
    if array.size <= _SAMPLE_MAX:
        return array
    # An odd stride, so that the sample covers all columns of a matrix.
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
        # Class by class, the entropy of marks is never larger than over all elements together.
        by_class = np.add.reduceat(counts, thresholds, axis=1)
        totals, hits = by_class.sum(axis=0), by_class[1]
        marks = sum(mark_bits(t, h) for t, h in zip(totals, hits, strict=True))
        bits[Codec.CLASS_GAP_ULP] = steps + marks
    return bits


def _plane_bits(array: np.ndarray) -> float:
    """Return the compressed size in bits of an array's byte planes."""
    planes = array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()
    return 8.0 * min(len(compress(planes)), len(planes))


def choose_thresholds(totals: np.ndarray, hits: np.ndarray, scale: float = 1.0) -> list[int]:
    """Divide the keys into classes such that the marks take few bits.

    Starts with a class per key and merges the two neighbors whose merge costs least, until every
    further merge would cost more than a class.

    Args:
        totals: Number of elements of a sample by key [num_keys].
        hits: Number of changed elements of the sample by key [num_keys].
        scale: Number of elements for each one of the sample.

    Returns:
        The first key of each class, rising from 0.

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
        # Only the merges next to the merged group have changed. Pricing all of them again took ten
        # times as long (0.5 ms per 4 MB).
        nearby = groups[max(0, index - 1) : index + 2]
        losses[max(0, index - 1) : index + 2] = [_merge_loss(a, b) for a, b in pairwise(nearby)]
    return [0, *(group[0] for group in groups[1:])]


def _merge_loss(first: tuple[int, float, float], second: tuple[int, float, float]) -> float:
    merged = mark_bits(first[1] + second[1], first[2] + second[2])
    return merged - mark_bits(first[1], first[2]) - mark_bits(second[1], second[2])


def mark_bits(total: float, hits: float) -> float:
    """Return the entropy in bits of `hits` marks among `total` places."""
    rate = hits / total if total else 0.0
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return -total * (rate * math.log2(rate) + (1.0 - rate) * math.log2(1.0 - rate))


def encode(base: np.ndarray, target: np.ndarray, dtype: Dtype | None = None) -> bytes:
    """Encode the difference between `base` and `target`.

    Args:
        base: Bit patterns as unsigned integers of the element size; contiguous, of any shape.
        target: Bit patterns of the same shape and dtype.
        dtype: Element type; by default uint8 is INT8, uint16 BF16, uint32 FP32, uint64 INT64.

    Returns:
        Payload with the codec of the smallest predicted size.

    Raises:
        ValueError: The arrays are not contiguous, differ in shape, or do not have the storage type
            of the element type.

    """
    dtype = check_pair(base, target, dtype)
    old, new = _elements(base, dtype), _elements(target, dtype)
    chosen = choose_codec(old, new, dtype)
    header, body = _encode(chosen, base, target, dtype)
    # The sample may miss all changes, or mispredict them: correct the choice by the real numbers.
    if header.num_changed == 0:
        header, body = _encode(CodecChoice(Codec.EQUAL, [0]), base, target, dtype)
    elif header.plain_bytes > target.nbytes:
        header, body = _encode(CodecChoice(Codec.RAW, [0]), base, target, dtype)
    return pack(header, body)


def encode_with(
    codec: Codec, base: np.ndarray, target: np.ndarray, dtype: Dtype | None = None
) -> bytes:
    """Encode with a given codec, whatever the size.

    Raises:
        ValueError: The arrays do not fit each other or the codec.

    """
    dtype = check_pair(base, target, dtype)
    if codec.has_steps and not dtype.traits.has_steps:
        raise ValueError(f"codec: {codec.name} does not support {dtype.name}")
    if codec is Codec.EQUAL and not np.array_equal(base, target):
        raise ValueError("codec: EQUAL requires equal arrays")
    thresholds = [0]
    if codec is Codec.CLASS_GAP_ULP:
        thresholds = class_thresholds(base, target, dtype)
    return pack(*_encode(CodecChoice(codec, thresholds), base, target, dtype))


def decode(base: np.ndarray, payload: bytes | memoryview) -> Patch:
    """Decode a payload to a patch of `base`, which is not changed.

    Args:
        base: Array that the payload was encoded against, contiguous.
        payload: Payload from `encode`.

    Raises:
        CorruptDataError: The payload is damaged, is not a delta, or is for another base.

    """
    header, body = _open_payload(base, payload)
    # First, because against another base the streams contradict each other or give wrong values.
    _verify_base(header, base)
    flat = base.reshape(-1)
    with _stream_errors_as_corrupt():
        if header.codec is Codec.EQUAL:
            return Patch(np.zeros(0, np.int64), flat[:0])
        if not header.codec.has_steps:
            return patch_between(flat, _decode_planes(header, flat, body))
        patch = Patch(*decode_steps(header, _elements(flat, header.dtype), body))
        return join_nibbles(patch, flat) if header.dtype is Dtype.INT4X2 else patch


def apply(
    base: np.ndarray, payload: bytes | memoryview, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the target, verified to be the array that was encoded.

    Args:
        base: Array that the payload was encoded against, contiguous.
        payload: Payload from `encode`.
        out: Memory for the target, of the base's shape and dtype, contiguous and not overlapping.
            The default is new memory, whose first access can take longer than decoding. The base
            is verified while it is read, so the contents of `out` are undefined after an error.

    Raises:
        CorruptDataError: As for `decode`, or the result is not the encoded target.
        ValueError: `out` does not fit the base.

    """
    header, body = _open_payload(base, payload)
    target = np.empty_like(base) if out is None else check_out(base, out)
    old, new = base.reshape(-1), target.reshape(-1)
    with _stream_errors_as_corrupt():
        # Steps are applied chunk by chunk, so that base and target are hashed while in the cache.
        if header.codec.has_steps and header.dtype is not Dtype.INT4X2:
            check = _apply_steps(header, old, body, new)
        else:
            _verify_base(header, base)
            _apply_whole(header, old, body, new)
            check = check_of(new)
    if check != header.target_check:
        raise CorruptDataError("delta: the result is not the array that was encoded")
    return target


def _apply_steps(header: Header, old: np.ndarray, body: bytes | memoryview, new: np.ndarray) -> int:
    """Write the target while verifying the base; return the target's checksum."""
    try:
        base_check, target_check = apply_steps(header, old, body, new)
    except ValueError:
        # The streams also contradict each other if the base is wrong; report that cause instead.
        _verify_base(header, old)
        raise
    _compare_base_check(header, base_check)
    return target_check


def _apply_whole(
    header: Header, old: np.ndarray, body: bytes | memoryview, new: np.ndarray
) -> None:
    """Write the target into `new` for codecs that process whole arrays."""
    if header.codec is Codec.EQUAL:
        new[...] = old
    elif not header.codec.has_steps:
        new[...] = _decode_planes(header, old, body)
    else:
        # The compiled code has no 4-bit elements: it works on one element per byte.
        halves = unpack_nibbles(old)
        apply_steps(header, halves.copy(), body, halves)
        new[...] = pack_nibbles(halves)


def _encode(
    chosen: CodecChoice, base: np.ndarray, target: np.ndarray, dtype: Dtype
) -> tuple[Header, bytes | memoryview]:
    old, new = _elements(base, dtype), _elements(target, dtype)
    header = Header(
        codec=chosen.codec,
        dtype=dtype,
        num_elements=old.size,
        num_changed=0,
        base_check=0,
        target_check=0,
    )
    if chosen.codec.has_steps:
        header, body = encode_steps(header, chosen.thresholds, old, new)
    else:
        header, body = _encode_planes(header, base.reshape(-1), target.reshape(-1))
    # Step codecs computed the checksums on the way, but for INT4X2 over unpacked halves.
    if not chosen.codec.has_steps or dtype is Dtype.INT4X2:
        checks = {"base_check": check_of(base), "target_check": check_of(target)}
        header = msgspec.structs.replace(header, **checks)
    return header, body


def _elements(array: np.ndarray, dtype: Dtype) -> np.ndarray:
    flat = array.reshape(-1)
    return unpack_nibbles(flat) if dtype is Dtype.INT4X2 else flat


def _open_payload(
    base: np.ndarray, payload: bytes | memoryview
) -> tuple[Header, bytes | memoryview]:
    """Return header and body of a payload that fits a base, whose checksum is not compared yet."""
    header, stored = unpack(payload)
    if base.size != header.num_items or base.dtype != header.dtype.storage:
        raise CorruptDataError(
            f"delta: expected a base of {header.num_items} items of {header.dtype.storage}"
            f" ({header.dtype.name}), got {base.dtype}{base.shape}"
        )
    if not base.flags.c_contiguous:
        raise ValueError("expected a contiguous base, got a strided one")
    return header, plain_body(header, stored)


def _verify_base(header: Header, base: np.ndarray) -> None:
    # RAW is the full target and applies to any base.
    if header.codec is not Codec.RAW:
        _compare_base_check(header, check_of(base))


def _compare_base_check(header: Header, check: int) -> None:
    if check != header.base_check:
        raise CorruptDataError("delta.base_check: the payload was made against another base")


@contextmanager
def _stream_errors_as_corrupt() -> Generator[None]:
    try:
        yield
    except CorruptDataError:
        raise
    except ValueError as error:
        raise CorruptDataError(f"delta: its streams contradict each other: {error}") from error


def _encode_planes(header: Header, base: np.ndarray, target: np.ndarray) -> tuple[Header, bytes]:
    """Return byte planes of the target (RAW) or the difference (XOR_ZSTD), or nothing (EQUAL).

    Args:
        header: Header with codec and element type; the returned one has the remaining fields.
        base: Base [N].
        target: Target [N].

    """
    if header.codec is Codec.EQUAL:
        return header, b""
    difference = base ^ target
    array = difference if header.codec is Codec.XOR_ZSTD else target
    # Bytes of equal significance compress better next to each other.
    body = array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()
    if header.dtype is Dtype.INT4X2:
        difference = unpack_nibbles(difference)
    num_changed = int(np.count_nonzero(difference))
    return msgspec.structs.replace(header, num_changed=num_changed, plain_bytes=len(body)), body


def _decode_planes(header: Header, base: np.ndarray, body: bytes | memoryview) -> np.ndarray:
    """Invert `_encode_planes` and return the target [N].

    Raises:
        ValueError: The planes do not fill the array.

    """
    if len(body) != base.nbytes:
        raise ValueError(f"{len(body)} bytes of planes for {base.nbytes} bytes of elements")
    planes = np.frombuffer(body, np.uint8).reshape(base.itemsize, -1)
    array = np.ascontiguousarray(planes.T).view(base.dtype).reshape(-1)
    return base ^ array if header.codec is Codec.XOR_ZSTD else array
