"""A reader of delta files in plain Python, written from `docs/weight-format.md` alone.

It shares no line with the package, works element by element, and checks nothing but what it needs.
"""

import json
import struct
from pathlib import Path

import msgpack
import zstandard
from blake3 import blake3
from tests.golden.delta_reader import read_changes

BITS = dict.fromkeys(["BF16", "F16", "I16", "U16"], 16)
BITS |= dict.fromkeys(["I32", "U32", "F32"], 32)
BITS |= dict.fromkeys(["I64", "U64", "F64", "C64"], 64)
HALF_BYTES = 9
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def word_bytes(dtype):
    """Return the size of a word: the element, but 4 at most, and a byte of packed ones."""
    return max(1, min(4, BITS.get(dtype, 8) // 8))


def tensors_of(data):
    """Return the words of each tensor of a safetensors file by name, and those of its head."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {("BYTES", "model.safetensors"): list(data[: 8 + length])}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        size = word_bytes(entry["dtype"])
        words = [int.from_bytes(data[i : i + size], "little") for i in range(begin, end, size)]
        found[entry["dtype"], name] = words
    return found


def apply_to_file(base_path: Path, delta_path: Path) -> bytes:
    """Return the bytes of the one file that the delta leads to."""
    base = tensors_of(base_path.read_bytes())
    data = delta_path.read_bytes()
    offset, stored, plain, version = struct.unpack("<QQII", data[-64:-40])
    assert data[:8] == b"\x89PSWD\r\n\x1a" and data[-8:] == b"PSWDEND\n" and version == 1
    packed = data[offset : offset + stored]
    assert blake3(data[:8] + packed + data[-64:-40]).digest() == data[-40:-8]
    manifest = msgpack.unpackb(zstandard.decompress(packed, max_output_size=plain))
    target = _targets(base, data, manifest)
    (file,) = manifest["files"]
    return b"".join(
        word.to_bytes(word_bytes(manifest["target"][row][1]), "little")
        for row in file[1]
        for word in target[row]
    )


def _targets(base, data, manifest):
    """Decode the extents one after the other; return the words of every row."""
    rows = manifest["target"]
    places = [(number, i) for number, row in enumerate(rows) for i in range(_num_words(row))]
    words = [[] for _ in rows]
    offset = 8
    reached = 0
    for _, _, num_words, _, _, num_bytes, digest in manifest["extents"]:
        payload = data[offset : offset + num_bytes]
        assert blake3(payload).digest() == digest
        own = places[reached : reached + num_words]
        old = [_base_word(base, rows[number], i) for number, i in own]
        new = _apply(old, word_bytes(rows[own[0][0]][1]), payload)
        for word, (number, _) in zip(new, own, strict=True):
            words[number].append(word)
        offset, reached = offset + num_bytes, reached + num_words
    return words


def _apply(old, size, payload):
    """Return the words that a payload leads to; it may count them in half bytes, of kind 9."""
    if payload[6] != HALF_BYTES:
        changes = read_changes(old, payload)
        return [changes.get(i, word) for i, word in enumerate(old)]
    halves = [word >> shift & 15 for word in old for shift in range(0, 8 * size, 4)]
    changes = read_changes(halves, payload)
    halves = [changes.get(i, half) for i, half in enumerate(halves)]
    return [
        sum(half << (4 * k) for k, half in enumerate(halves[i : i + 2 * size]))
        for i in range(0, len(halves), 2 * size)
    ]


def _base_word(base, row, i):
    name, dtype = row[:2]
    own = base.get((dtype, name), [])
    return own[i] if len(own) == _num_words(row) else 0


def _num_words(row):
    _, dtype, shape = row[:3]
    num_bits = BITS.get(dtype, 8)
    for size in shape:
        num_bits *= size
    return num_bits // 8 // word_bytes(dtype)
