"""A reader of delta payloads in plain Python, written from the layout in `delta/container.py`.

It shares no line with the fast path, and takes one element at a time: an oracle, and the shortest
full account of the format.
"""

import struct

import zstandard

Changes = dict[int, int]
"""Position -> new bit pattern."""


def read_changes(base: list[int], payload: bytes) -> Changes:
    """Decode a sound payload against the bit patterns of its base."""
    _, _, codec, itemsize, num_classes, num_elements, _, _, _ = struct.unpack_from(
        "<4sBBBBQQQQ", payload
    )
    classes = [struct.unpack_from("<BBBxIIxxxx", payload, 40 + 16 * c) for c in range(num_classes)]
    num_streams = {0: 0, 1: itemsize}.get(codec, 5 * num_classes)
    streams = _streams(payload, 40 + 16 * num_classes, num_streams)
    if codec == 0:
        return {}
    if codec == 1:
        target = [
            sum(streams[plane][i] << (8 * plane) for plane in range(itemsize))
            for i in range(num_elements)
        ]
        return {i: bits for i, bits in enumerate(target) if bits != base[i]}
    changes: Changes = {}
    starts = [record[0] for record in classes] + [256]
    for number, record in enumerate(classes):
        members = [
            i
            for i, bits in enumerate(base)
            if num_classes == 1 or starts[number] <= (bits >> 7 & 0xFF) < starts[number + 1]
        ]
        own = streams[5 * number : 5 * number + 5]
        moved = _moved(members, record[1], bool(record[2]), own)
        changes |= _values(base, moved, itemsize, own)
    return changes


def _streams(payload: bytes, offset: int, num_streams: int) -> list[bytes]:
    lengths = [struct.unpack_from("<II", payload, offset + 8 * s) for s in range(num_streams)]
    offset += 8 * num_streams
    streams: list[bytes] = []
    for plain_bytes, stored_bytes in lengths:
        stored = payload[offset : offset + stored_bytes]
        offset += stored_bytes
        is_plain = plain_bytes == stored_bytes
        streams.append(stored if is_plain else zstandard.ZstdDecompressor().decompress(stored))
    return streams


def _moved(members: list[int], shift: int, inverted: bool, own: list[bytes]) -> list[int]:
    """Walk the gaps of one class."""
    low_bits = int.from_bytes(own[1], "little")
    escapes = iter(struct.unpack(f"<{len(own[2]) // 4}I", own[2]))
    coded: set[int] = set()
    position = -1
    for code in own[0]:
        high = next(escapes) if code == 255 else code
        position += 1 + (high << shift) + (low_bits & ((1 << shift) - 1))
        low_bits >>= shift
        coded.add(position)
    return [member for i, member in enumerate(members) if (i in coded) != inverted]


def _values(base: list[int], moved: list[int], itemsize: int, own: list[bytes]) -> Changes:
    """Add each step, in units in the last place, to the ordered integer of its base."""
    width = 8 * itemsize
    sign, mask = 1 << (width - 1), (1 << width) - 1
    escapes = iter(
        int.from_bytes(own[4][i : i + itemsize], "little") for i in range(0, len(own[4]), itemsize)
    )
    changes: Changes = {}
    for place, code in zip(moved, own[3], strict=True):
        folded = ((next(escapes) if code == 255 else code) + 1) & mask
        step = -(folded + 1 >> 1) if folded & 1 else folded >> 1
        rank = base[place] ^ mask if base[place] & sign else base[place] | sign
        rank = (rank + step) & mask
        changes[place] = rank ^ sign if rank & sign else rank ^ mask
    return changes
