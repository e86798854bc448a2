"""Coding of marks and steps in NumPy: the portable equivalent of `c/delta.c`, and its test oracle.

Both write the same bits.

```
 class c:  ranks of changed elements ──▶ gaps      (or one mask for all classes, in bitmask_ulp)
           their steps ──▶ signs;   large ones among them ──▶ gaps, and their sizes
 body:     [mask] signs of all classes │ unary string │ low bits
```
The gaps and sizes of all classes, one series after the other, go to one pair of Rice-coded
strings. If more than half of the places are marked, the gaps between the unmarked ones are coded.

Values are coded as steps in units in the last place. The bits of floats, read as integers with the
negative half reversed, have the order of the numbers: neighbors differ by one, also across zero and
powers of two. An optimizer step usually moves a weight by one such unit, up or down with similar
probability. Signs are therefore plain bits, steps larger than one are marked, and the sizes of
those few are Rice codes. Integers are subtracted as they are. All arithmetic wraps, so that NaN
payloads and infinities are preserved.

Gaps between scattered places have a geometric distribution, for which Rice codes are within a few
hundredths of a bit of optimal. The low `k` bits of a number are stored directly and the rest in
unary. `k` is chosen per block of 128 numbers, so that it follows the density along the array. All
numbers of a payload go to the same two strings of bits, lowest bit of a byte first:

```
 unary:  for each block zigzag(k - previous k), then for each number its high part,
         each as that many zeros and a one
 low:    for each number its k low bits; if its high part is 32 or more, the unary string has 32
         and this string all 32 bits of the number
```
"""

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np

from penstock.kernels.delta.arrays import check_of
from penstock.kernels.delta.dtypes import Dtype, exponent_keys
from penstock.kernels.delta.header import ClassRecord, Codec, Header, MarksRecord

BLOCK = 128
ESCAPE = 32
"""High part that marks a number stored with all its bits in the low string."""
K_MAX = 31
_WHOLE_BITS = 32


class RiceWriter:
    """Writer of Rice codes, which collects numbers and packs them at the end."""

    def __init__(self) -> None:
        self._unary: list[np.ndarray] = [np.zeros(0, np.int64)]
        self._low: list[np.ndarray] = [np.zeros(0, np.uint64)]
        self._widths: list[np.ndarray] = [np.zeros(0, np.int64)]

    def append(self, values: np.ndarray) -> None:
        """Add a series of numbers [M] below 2**32."""
        if not values.size:
            return
        values = values.astype(np.int64)
        params = _best_params(values)
        shifts = np.repeat(params, BLOCK)[: values.size]
        # Capped, so that a single large number does not take a long run of zeros.
        high = np.minimum(values >> shifts, ESCAPE)
        widths = np.where(high == ESCAPE, _WHOLE_BITS, shifts)
        turns = np.diff(params, prepend=0)
        heads = np.where(turns < 0, -2 * turns - 1, 2 * turns)
        self._unary.append(np.insert(high, np.arange(params.size) * BLOCK, heads))
        self._low.append((values & ((1 << widths) - 1)).astype(np.uint64))
        self._widths.append(widths)

    def finish(self) -> tuple[bytes, bytes]:
        """Return the unary and low strings, padded with zero bits to whole bytes."""
        ends = np.cumsum(np.concatenate(self._unary) + 1)
        bits = np.zeros(ends[-1] if ends.size else 0, np.uint8)
        bits[ends - 1] = 1
        widths = np.concatenate(self._widths)
        starts = np.cumsum(widths) - widths
        # Position of each bit within its number.
        places = np.arange(widths.sum()) - np.repeat(starts, widths)
        low = np.repeat(np.concatenate(self._low), widths) >> places.astype(np.uint64)
        return _pack(bits), _pack((low & np.uint64(1)).astype(np.uint8))


class RiceReader:
    """Reader of series of Rice codes, in the order in which they were appended."""

    def __init__(self, unary: bytes | memoryview, low: bytes | memoryview) -> None:
        ones = np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8), bitorder="little"))
        self._numbers = np.diff(ones, prepend=-1) - 1
        # Padded, so that an 8-byte window can be read at any position of the string.
        padded = np.frombuffer(bytes(low) + bytes(8), np.uint8)
        self._windows = np.lib.stride_tricks.sliding_window_view(padded, 8)
        self._unary_bits = 8 * len(unary)
        self._low_bits = 8 * len(low)
        self._at = self._low_at = 0

    def read(self, count: int) -> np.ndarray:
        """Return the next series, int64 [count].

        Raises:
            ValueError: There are fewer numbers left, or one is out of bounds.

        """
        num_blocks = -(-count // BLOCK)
        # Each block starts with the change of its parameter.
        numbers = self._numbers[self._at : self._at + count + num_blocks]
        if numbers.size != count + num_blocks:
            raise ValueError(f"the unary string ends before {count} numbers")
        self._at += numbers.size
        head_places = np.arange(num_blocks) * (BLOCK + 1)
        heads, high = numbers[head_places], np.delete(numbers, head_places)
        params = np.cumsum(np.where(heads & 1, -(heads + 1) >> 1, heads >> 1))
        if np.any((params < 0) | (params > K_MAX)) or np.any(high > ESCAPE):
            raise ValueError("a Rice parameter or a high part is out of bounds")
        shifts = np.repeat(params, BLOCK)[:count]
        is_whole = high == ESCAPE
        low = self._read_low(np.where(is_whole, _WHOLE_BITS, shifts))
        return np.where(is_whole, low, (high << shifts) + low)

    def _read_low(self, widths: np.ndarray) -> np.ndarray:
        ends = self._low_at + np.cumsum(widths)
        starts, self._low_at = ends - widths, int(ends[-1]) if ends.size else self._low_at
        if self._low_at > self._low_bits:
            raise ValueError("the low bits end too early")
        words = self._windows[starts >> 3].copy().view("<u8").reshape(-1).astype(np.int64)
        return (words >> (starts & 7)) & ((1 << widths) - 1)

    def finish(self) -> None:
        """Check that everything was read.

        Raises:
            ValueError: Bits are left over.

        """
        used = int(self._numbers[: self._at].sum()) + self._at
        is_over = self._at != self._numbers.size or self._unary_bits - used >= 8
        if is_over or self._low_bits - self._low_at >= 8:
            raise ValueError("bits are left over after the last number")


def _best_params(values: np.ndarray) -> np.ndarray:
    """Return the parameter with the smallest size for each block; the lowest one on a tie."""
    starts = np.arange(0, values.size, BLOCK)
    costs = np.empty((K_MAX + 1, starts.size), np.int64)
    for k in range(K_MAX + 1):
        high = values >> k
        # Unary zeros, a one, and k low bits; or an escape and all bits.
        bits = np.where(high < ESCAPE, high + 1 + k, ESCAPE + 1 + _WHOLE_BITS)
        costs[k] = np.add.reduceat(bits, starts)
    return costs.argmin(axis=0)


def _pack(bits: np.ndarray) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


SMALLEST_LARGE = 2
"""Smallest step that counts as large; its size is coded explicitly."""


def encode_steps(
    header: Header, thresholds: list[int], base: np.ndarray, target: np.ndarray
) -> tuple[Header, bytes]:
    """Encode the changed positions and their steps.

    Args:
        header: Header with codec and element type; the returned one has the remaining fields.
        thresholds: First key of each class; a single one for codecs without classes.
        base: Elements [N].
        target: Elements [N].

    Returns:
        The complete header and the plain body.

    """
    rice = RiceWriter()
    is_changed = base != target
    has_mask = header.codec is Codec.BITMASK_ULP
    records: list[ClassRecord] = []
    signs: list[np.ndarray] = []
    for key, members in zip(thresholds, _members(base, thresholds, header.dtype), strict=True):
        marked = is_changed[members]
        # The order in which series are written is part of the format.
        changed = MarksRecord(0, False) if has_mask else _append_marks(rice, marked)
        places = members[marked]
        is_down, sizes = steps_between(base[places], target[places], header.dtype)
        is_large = sizes >= SMALLEST_LARGE
        large = _append_marks(rice, is_large)
        rice.append(sizes[is_large] - sizes.dtype.type(SMALLEST_LARGE))
        records.append(
            ClassRecord(first_key=key, num_changed=places.size, changed=changed, large=large)
        )
        signs.append(is_down)
    unary, low = rice.finish()
    mask = _pack(is_changed) if has_mask else b""
    body = b"".join((mask, _pack(np.concatenate(signs)), unary, low))
    whole = msgspec.structs.replace(
        header,
        num_changed=sum(record.num_changed for record in records),
        base_check=check_of(base),
        target_check=check_of(target),
        classes=tuple(records),
        unary_bytes=len(unary),
        plain_bytes=len(body),
    )
    return whole, body


def decode_steps(
    header: Header, base: np.ndarray, body: bytes | memoryview
) -> tuple[np.ndarray, np.ndarray]:
    """Invert `encode_steps`.

    Returns:
        Changed positions int64 [K], rising, and their new elements [K].

    Raises:
        ValueError: The body contradicts the header.

    """
    mask, signs, unary, low = split_body(header, body)
    rice = RiceReader(unary, low)
    thresholds = [record.first_key for record in header.classes]
    members = _members(base, thresholds, header.dtype)
    ends = np.cumsum([record.num_changed for record in header.classes])
    is_down = np.split(_unpack(signs, header.num_changed), ends[:-1])
    places, values = [], []
    for record, positions, down in zip(header.classes, members, is_down, strict=True):
        marked = _read_marks(rice, record.changed, positions.size)
        if header.codec is Codec.BITMASK_ULP:
            marked = _unpack(mask, base.size)
        where = positions[marked]
        # Payloads may be forged: counts are checked against the base before they are used.
        if where.size != record.num_changed:
            raise ValueError(f"{where.size} marks for {record.num_changed} changes")
        is_large = _read_marks(rice, record.large, where.size)
        sizes = np.ones(where.size, base.dtype)
        sizes[is_large] = _read_sizes(rice, record.num_large, header.dtype)
        places.append(where)
        values.append(walk(base[where], down, sizes, header.dtype))
    rice.finish()
    # Classes interleave, so positions rise only after sorting.
    joined = np.concatenate(places)
    order = np.argsort(joined)
    return joined[order], np.concatenate(values)[order]


def tally(base: np.ndarray, target: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Count elements by key -> int64 [2, num_keys]: unchanged ones, then changed ones."""
    num_keys = dtype.traits.num_keys
    bins = exponent_keys(base, dtype).astype(np.int64) + num_keys * (base != target)
    return np.bincount(bins, minlength=2 * num_keys).reshape(2, -1)


def split_body(header: Header, body: bytes | memoryview) -> list[memoryview]:
    """Split a body into mask, signs, unary string and low bits.

    Raises:
        ValueError: The body is too short for them.

    """
    cuts = np.cumsum([0, *flag_bytes(header, header.num_changed), header.unary_bytes]).tolist()
    if cuts[-1] > len(body):
        raise ValueError(f"the body has {len(body)} bytes, its streams at least {cuts[-1]}")
    return [memoryview(body)[start:end] for start, end in pairwise([*cuts, len(body)])]


def flag_bytes(header: Header, num_changed: int) -> tuple[int, int]:
    """Return the lengths in bytes of the mask and of the signs."""
    has_mask = header.codec is Codec.BITMASK_ULP
    return -(-header.num_elements // 8) if has_mask else 0, -(-num_changed // 8)


def _members(base: np.ndarray, thresholds: list[int], dtype: Dtype) -> Iterator[np.ndarray]:
    """Yield the rising positions of the elements of each class."""
    if len(thresholds) == 1:
        yield np.arange(base.size)
        return
    labels = np.searchsorted(thresholds, np.arange(dtype.traits.num_keys), side="right") - 1
    classes = labels.astype(np.uint8)[exponent_keys(base, dtype)]
    # Stable, so that positions rise within each class.
    order = np.argsort(classes, kind="stable")
    ends = np.cumsum(np.bincount(classes, minlength=len(thresholds)))
    yield from np.split(order, ends[:-1])


def _append_marks(rice: RiceWriter, marked: np.ndarray) -> MarksRecord:
    """Write which places are marked (bool [M]) as gaps between them."""
    # The smaller set is coded.
    inverted = 2 * int(np.count_nonzero(marked)) > marked.size
    coded = np.flatnonzero(marked != inverted)
    rice.append(np.diff(coded, prepend=-1) - 1)
    return MarksRecord(coded.size, inverted)


def _read_marks(rice: RiceReader, record: MarksRecord, population: int) -> np.ndarray:
    """Read which places are marked, bool [population]."""
    coded = np.cumsum(rice.read(record.num_coded) + 1) - 1
    if coded.size and coded[-1] >= population:
        raise ValueError(f"a mark is outside of the {population} places")
    marked = np.full(population, record.inverted)
    marked[coded] = not record.inverted
    return marked


def _read_sizes(rice: RiceReader, count: int, dtype: Dtype) -> np.ndarray:
    sizes = rice.read(count) + SMALLEST_LARGE
    if count and int(sizes.max()) > 1 << (dtype.traits.bits - 1):
        raise ValueError("a step is larger than half of the elements' range")
    return sizes.astype(dtype.storage)


def _unpack(data: memoryview, count: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little")
    if bits.size != count:
        raise ValueError(f"{bits.size} bits where {count} were expected")
    return bits.view(np.bool_)


def ordered(bits: np.ndarray) -> np.ndarray:
    """Map bit patterns of floats to unsigned integers in the order of the numbers."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def from_ordered(rank: np.ndarray) -> np.ndarray:
    """Invert `ordered`."""
    sign = rank.dtype.type(1 << (8 * rank.itemsize - 1))
    return np.where(rank & sign, rank ^ sign, ~rank)


def steps_between(
    base: np.ndarray, target: np.ndarray, dtype: Dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each step is down (bool [K]), and its size (unsigned [K], >= 1)."""
    mask, half = _mask_and_half(base, dtype)
    if dtype.traits.is_float:
        base, target = ordered(base), ordered(target)
    # Unsigned arithmetic wraps; a step of more than half the range is one down.
    step = (target - base) & mask
    is_down = step >= half
    return is_down, np.where(is_down, (base.dtype.type(0) - step) & mask, step)


def walk(base: np.ndarray, is_down: np.ndarray, sizes: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Invert `steps_between` and return the target elements [K]."""
    mask, _ = _mask_and_half(base, dtype)
    step = np.where(is_down, base.dtype.type(0) - sizes, sizes)
    if dtype.traits.is_float:
        return from_ordered(ordered(base) + step)
    return (base + step) & mask


def _mask_and_half(array: np.ndarray, dtype: Dtype) -> tuple[np.generic, np.generic]:
    """Return a mask of all bits of an element, and one of only its highest bit."""
    bits = dtype.traits.bits
    return array.dtype.type((1 << bits) - 1), array.dtype.type(1 << (bits - 1))
