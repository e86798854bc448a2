"""Write the checkpoint that a delta leads to, byte for byte the files it was made from.

Every extent is checked before it is written, every tensor's digest after the last; only then does
the output take its place.
"""

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from penstock.infra.weights.diff import Advance, ordered_map
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.infra.weights.files.manifest import Manifest, TensorSlice
from penstock.infra.weights.files.output import new_file, new_folder
from penstock.infra.weights.files.tensors import Weights
from penstock.infra.weights.patched import Patched
from penstock.messages.errors import CorruptDataError

OUTPUT_SLACK_BYTES, OUTPUT_RATIO_MAX = 64 << 20, 64
Places = list[tuple[int, int]]
"""File descriptor and offset of the first byte, by row of the target table."""


def apply_delta(
    base: Weights, patch: DeltaFile, output: Path, *, num_threads: int, advance: Advance
) -> int:
    """Write the target of a delta; return how many bytes it has.

    Args:
        base: what the delta was made against.
        patch: the delta.
        output: a file, or a new or empty folder, as the target was one.
        num_threads: how many decode at once.
        advance: called with the bytes written.

    Raises:
        CorruptDataError: wrong base, or a damaged delta; `output` is untouched.
        ConfigError: `output` cannot be what is to be written.
        OSError: e.g. the disk is full; nothing is left behind.

    """
    manifest = patch.manifest
    _check_size(base, patch)
    view = Patched(base, patch, num_kept=0)
    hashers = [row.hasher() for row in manifest.target]
    rooms = _rooms(manifest, num_threads + 1)

    def decoded(number: int) -> tuple[list[TensorSlice], np.ndarray, np.ndarray]:
        room = rooms.get_nowait()
        return *view.extent(number, room), room

    with _outputs(manifest, output) as places:
        numbers = range(len(manifest.extents))
        for pieces, words, room in ordered_map(decoded, numbers, num_threads):
            begin = 0
            for piece in pieces:
                part = words[begin : begin + piece.num_words]
                begin += piece.num_words
                hashers[piece.row].update(part)
                _write(places[piece.row], piece, part.data.cast("B"), part.itemsize)
            advance(words.nbytes)
            rooms.put(room)
        for row, hasher in zip(manifest.target, hashers, strict=True):
            if hasher.digest() != row.digest:
                raise CorruptDataError(f"{patch.path}: {row.name!r} has another digest")
    return sum(row.num_bytes for row in manifest.target)


def _check_size(base: Weights, patch: DeltaFile) -> None:
    """Refuse a few kilobytes that would fill a disk with zeros."""
    input_bytes = patch.num_bytes + sum(tensor.num_bytes for tensor in base.tensors.values())
    target_bytes = sum(row.num_bytes for row in patch.manifest.target)
    if target_bytes > OUTPUT_SLACK_BYTES + OUTPUT_RATIO_MAX * input_bytes:
        raise CorruptDataError(
            f"{patch.path}: leads from {input_bytes:,} bytes, its own included, to"
            f" {target_bytes:,}: no checkpoint grows like that"
        )


def _rooms(manifest: Manifest, count: int) -> SimpleQueue[np.ndarray]:
    """Return memory for as many extents as are decoded at once, which they reuse."""
    num_bytes = max(
        (e.num_words * manifest.target[e.row].element_type.word_bytes for e in manifest.extents),
        default=0,
    )
    rooms: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(count):
        rooms.put(np.empty(num_bytes, np.uint8))
    return rooms


@contextmanager
def _outputs(manifest: Manifest, output: Path) -> Generator[Places]:
    """Open every file of the target at its full size: a disk too small shows at once."""
    places: Places = [(-1, 0)] * len(manifest.target)
    with ExitStack() as stack:
        root = stack.enter_context(new_folder(output)) if manifest.is_folder else None
        for file in manifest.files:
            descriptor = stack.enter_context(_open(root, file.path, output))
            offset = 0
            for number in file.rows:
                places[number] = (descriptor, offset)
                offset += manifest.target[number].num_bytes
            if offset:
                os.posix_fallocate(descriptor, 0, offset)
        yield places


@contextmanager
def _open(root: Path | None, path: str, output: Path) -> Generator[int]:
    if root is None:
        with new_file(output) as file:
            yield file.fileno()
        return
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("xb") as file:
        yield file.fileno()
        os.fsync(file.fileno())


def _write(place: tuple[int, int], piece: TensorSlice, data: memoryview, word_bytes: int) -> None:
    descriptor, offset = place
    offset += piece.first_word * word_bytes
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
