"""A reader of delta payloads in plain Python, written from the layout in `docs/weight-format.md`.

It shares no line with the fast paths, and takes one bit and one element at a time: an oracle, and
the shortest full account of the format.
"""

import struct

import zstandard

Changes = dict[int, int]
"""Element -> new bit pattern; an element of INT4X2 is half a byte."""
_BITS = (8, 16, 32, 64, 16, 16, 32, 64, 8, 4)
_EXPONENTS = {4: (7, 255), 5: (10, 31), 6: (23, 255), 8: (3, 15)}
_IS_FLOAT = {4, 5, 6, 7, 8}
_CLASS_GAP, _BITMASK, _XOR, _RAW = 1, 3, 4, 5


def read_changes(base: list[int], payload: bytes) -> Changes:
    """Decode a sound payload against the bit patterns of its base."""
    _, _, codec, dtype, num_classes, num_elements, num_changed, _, _ = struct.unpack_from(
        "<4sBBBBQQQQ", payload
    )
    numbers, offset = _table(payload, 4 * num_classes + 2)
    unary_bytes, plain_bytes = numbers[-2:]
    body = payload[offset:-8]
    if len(body) != plain_bytes:
        body = zstandard.ZstdDecompressor().decompress(body)
    if codec == 0:
        return {}
    if codec in (_XOR, _RAW):
        return _read_planes(base, body, _BITS[dtype], codec == _XOR)
    mask_bytes = (num_elements + 7) // 8 if codec == _BITMASK else 0
    sign_bytes = (num_changed + 7) // 8
    mask, signs = _bits(body[:mask_bytes]), _bits(body[mask_bytes : mask_bytes + sign_bytes])
    strings = body[mask_bytes + sign_bytes :]
    rice = _Rice(_bits(strings[:unary_bytes]), _bits(strings[unary_bytes:]))
    classes = [numbers[4 * c : 4 * c + 4] for c in range(num_classes)]
    ends = [record[0] for record in classes[1:]] + [1 << 16]
    changes: Changes = {}
    for (first, own_changed, marks, large_marks), end in zip(classes, ends, strict=True):
        members = [i for i, bits in enumerate(base) if first <= _key(bits, dtype) < end]
        if codec == _BITMASK:
            moved = [i for i in members if mask[i]]
        else:
            moved = rice.marked(members, marks)
        large = rice.marked(list(range(own_changed)), large_marks)
        sizes = dict(zip(large, rice.series(len(large)), strict=True))
        for i, place in enumerate(moved):
            step = sizes.get(i, -1) + 2
            changes[place] = _walk(base[place], -step if signs.pop(0) else step, dtype)
    return changes


def _table(payload: bytes, count: int) -> tuple[list[int], int]:
    """Read LEB128 numbers; return them and where they end."""
    numbers: list[int] = []
    offset = 40
    for _ in range(count):
        value = shift = 0
        while True:
            byte = payload[offset]
            offset += 1
            value += (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        numbers.append(value)
    return numbers, offset


def _bits(data: bytes) -> list[int]:
    return [byte >> i & 1 for byte in data for i in range(8)]


class _Rice:
    def __init__(self, unary: list[int], low: list[int]) -> None:
        self._unary, self._low = iter(unary), iter(low)

    def marked(self, among: list[int], marks: int) -> list[int]:
        """Walk the gaps; return those of `among` that are marked."""
        count, inverted = marks >> 1, bool(marks & 1)
        coded: set[int] = set()
        place = -1
        for gap in self.series(count):
            place += 1 + gap
            coded.add(place)
        return [item for i, item in enumerate(among) if (i in coded) != inverted]

    def series(self, count: int) -> list[int]:
        """Read the next numbers."""
        values: list[int] = []
        k = 0
        for i in range(count):
            if i % 128 == 0:
                turn = self._count_zeros()
                k += -(turn // 2) - 1 if turn % 2 else turn // 2
            high = self._count_zeros()
            values.append(self._number(32) if high == 32 else (high << k) + self._number(k))
        return values

    def _count_zeros(self) -> int:
        zeros = 0
        while not next(self._unary):
            zeros += 1
        return zeros

    def _number(self, width: int) -> int:
        return sum(next(self._low) << i for i in range(width))


def _key(bits: int, dtype: int) -> int:
    shift, mask = _EXPONENTS.get(dtype, (0, 0))
    return bits >> shift & mask


def _walk(bits: int, step: int, dtype: int) -> int:
    """Move `step` units along the order of the numbers."""
    width = _BITS[dtype]
    sign, mask = 1 << (width - 1), (1 << width) - 1
    if dtype not in _IS_FLOAT:
        return (bits + step) & mask
    rank = bits ^ mask if bits & sign else bits | sign
    rank = (rank + step) & mask
    return rank ^ sign if rank & sign else rank ^ mask


def _read_planes(base: list[int], body: bytes, bits: int, is_xor: bool) -> Changes:
    """Join the byte planes; two elements of four bits make a byte."""
    if bits == 4:
        halves = [byte >> shift & 15 for byte in body for shift in (0, 4)]
        target = halves
    else:
        target = [
            sum(body[plane * len(base) + i] << (8 * plane) for plane in range(bits // 8))
            for i in range(len(base))
        ]
    if is_xor:
        target = [old ^ new for old, new in zip(base, target, strict=True)]
    return {i: new for i, new in enumerate(target) if new != base[i]}
