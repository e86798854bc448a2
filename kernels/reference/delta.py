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
    classes = [struct.unpack_from("<BBBBBxxxIII", payload, 40 + 20 * c) for c in range(num_classes)]
    num_streams = {0: 0, 1: itemsize}.get(codec, 9 * num_classes)
    streams = _streams(payload, 40 + 20 * num_classes, num_streams)
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
    for number, (_, shift, inverted, large_shift, large_inverted, *_) in enumerate(classes):
        own = streams[9 * number : 9 * number + 9]
        members = list(range(num_elements))
        if codec == 3:
            members = _class_members(base, starts[number], starts[number + 1])
        moved = _marked(members, shift, bool(inverted), own[:3])
        large = _marked(list(range(len(moved))), large_shift, bool(large_inverted), own[4:7])
        sizes = _sizes(large, itemsize, own[7], own[8])
        for i, place in enumerate(moved):
            is_down = own[3][i // 8] >> (i % 8) & 1
            size = sizes.get(i, 1)
            changes[place] = _walk(base[place], -size if is_down else size, 8 * itemsize)
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


def _class_members(base: list[int], first_key: int, end_key: int) -> list[int]:
    """List the places of one class by rank: by tile, then exponent, then place."""
    keys = {i: bits >> 7 & 0xFF for i, bits in enumerate(base)}
    places = [i for i in keys if first_key <= keys[i] < end_key]
    return sorted(places, key=lambda i: (i // 65536, keys[i], i))


def _marked(among: list[int], shift: int, inverted: bool, own: list[bytes]) -> list[int]:
    """Walk the gaps; return those of `among` that are marked."""
    low_bits = int.from_bytes(own[1], "little")
    escapes = iter(struct.unpack(f"<{len(own[2]) // 4}I", own[2]))
    coded: set[int] = set()
    position = -1
    for code in own[0]:
        high = next(escapes) if code == 255 else code
        position += 1 + (high << shift) + (low_bits & ((1 << shift) - 1))
        low_bits >>= shift
        coded.add(position)
    return [place for i, place in enumerate(among) if (i in coded) != inverted]


def _sizes(large: list[int], itemsize: int, codes: bytes, escaped: bytes) -> dict[int, int]:
    """Read the sizes, 2 and more, of the large steps."""
    escapes = iter(
        int.from_bytes(escaped[i : i + itemsize], "little")
        for i in range(0, len(escaped), itemsize)
    )
    return {
        i: (next(escapes) if code == 255 else code) + 2
        for i, code in zip(large, codes, strict=True)
    }


def _walk(bits: int, step: int, width: int) -> int:
    """Move `step` units in the last place along the order of the numbers."""
    sign, mask = 1 << (width - 1), (1 << width) - 1
    rank = bits ^ mask if bits & sign else bits | sign
    rank = (rank + step) & mask
    return rank ^ sign if rank & sign else rank ^ mask
