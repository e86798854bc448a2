"""Rice codes of small numbers, with a parameter for every 128 of them.

Gaps between scattered places are geometric, and Rice codes are within a few hundredths of a bit of
the best code for those. The low `k` bits of a number stand as they are, the rest in unary; `k` is
the cheapest for its block, so that it follows a density that changes along the array. All numbers
of a payload go to the same two strings of bits, the lowest bit of a byte first:

```
 unary:  for each block, zigzag(k - the k before), then for each number its high part,
         each as so many zeros and a one
 low:    for each number its k low bits; all 32 bits of one whose high part would be 32 or more,
         which stands as 32 in the unary string
```
This is the portable twin of the compiled code in `delta.c`: both write the same bits.
"""

import numpy as np

BLOCK = 128
ESCAPE = 32
"""The high part of a number that is stored whole among the low bits."""
K_MAX = 31
_WHOLE_BITS = 32


class RiceWriter:
    """Collects numbers; packs them once, at the end."""

    def __init__(self) -> None:
        self._unary: list[np.ndarray] = [np.zeros(0, np.int64)]
        self._low: list[np.ndarray] = [np.zeros(0, np.uint64)]
        self._widths: list[np.ndarray] = [np.zeros(0, np.int64)]

    def append(self, values: np.ndarray) -> None:
        """Add numbers [M] below 2**32, a series of its own."""
        if not values.size:
            return
        values = values.astype(np.int64)
        params = _best_params(values)
        shifts = np.repeat(params, BLOCK)[: values.size]
        high = np.minimum(values >> shifts, ESCAPE)
        widths = np.where(high == ESCAPE, _WHOLE_BITS, shifts)
        turns = np.diff(params, prepend=0)
        heads = np.where(turns < 0, -2 * turns - 1, 2 * turns)
        self._unary.append(np.insert(high, np.arange(params.size) * BLOCK, heads))
        self._low.append((values & ((1 << widths) - 1)).astype(np.uint64))
        self._widths.append(widths)

    def finish(self) -> tuple[bytes, bytes]:
        """Return the two strings, each filled up with zero bits to whole bytes."""
        ends = np.cumsum(np.concatenate(self._unary) + 1)
        bits = np.zeros(ends[-1] if ends.size else 0, np.uint8)
        bits[ends - 1] = 1
        widths = np.concatenate(self._widths)
        starts = np.cumsum(widths) - widths
        places = np.arange(widths.sum()) - np.repeat(starts, widths)
        low = np.repeat(np.concatenate(self._low), widths) >> places.astype(np.uint64)
        return _pack(bits), _pack((low & np.uint64(1)).astype(np.uint8))


class RiceReader:
    """Reads back the series in the order in which they were appended."""

    def __init__(self, unary: bytes | memoryview, low: bytes | memoryview) -> None:
        ones = np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8), bitorder="little"))
        self._numbers = np.diff(ones, prepend=-1) - 1
        padded = np.frombuffer(bytes(low) + bytes(8), np.uint8)
        self._windows = np.lib.stride_tricks.sliding_window_view(padded, 8)
        self._unary_bits = 8 * len(unary)
        self._low_bits = 8 * len(low)
        self._at = self._low_at = 0

    def read(self, count: int) -> np.ndarray:
        """Return the next series, int64 [count].

        Raises:
            ValueError: there are not so many numbers, or one is out of bounds.

        """
        num_blocks = -(-count // BLOCK)
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
        """Check that all was read.

        Raises:
            ValueError: bits are left over.

        """
        used = int(self._numbers[: self._at].sum()) + self._at
        is_over = self._at != self._numbers.size or self._unary_bits - used >= 8
        if is_over or self._low_bits - self._low_at >= 8:
            raise ValueError("bits are left over after the last number")


def _best_params(values: np.ndarray) -> np.ndarray:
    """Return for each block the parameter of the fewest bits, the lowest of equals."""
    starts = np.arange(0, values.size, BLOCK)
    costs = np.empty((K_MAX + 1, starts.size), np.int64)
    for k in range(K_MAX + 1):
        high = values >> k
        bits = np.where(high < ESCAPE, high + 1 + k, ESCAPE + 1 + _WHOLE_BITS)
        costs[k] = np.add.reduceat(bits, starts)
    return costs.argmin(axis=0)


def _pack(bits: np.ndarray) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()
