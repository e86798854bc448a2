"""The manifest of a delta file: two tensor tables, the files, and the extents.

It is untrusted: `decode_manifest` bounds every number and name before anything uses them.
"""

from itertools import accumulate
from pathlib import PurePosixPath
from typing import Annotated

import msgspec

from penstock.infra.weights.files.paths import FILES_MAX, is_portable
from penstock.infra.weights.files.tensors import Key, Tensor
from penstock.messages.errors import CodecError, CorruptDataError
from penstock.messages.reading.parsing import parse_msgpack

EXTENT_WORDS_MAX = 1 << 22
PAYLOAD_BYTES_MAX = 1 << 25
"""Twice the largest extent, which a writer stores uncompressed if coding does not help."""
_TENSOR_BYTES_MAX = 1 << 48
_NATURAL = Annotated[int, msgspec.Meta(ge=0)]
_DIGEST = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class TensorRow(Tensor, frozen=True, array_like=True):
    """A tensor and the digest of its dtype, shape and bytes."""

    digest: _DIGEST


class TargetRow(TensorRow, frozen=True, array_like=True):
    """A tensor of the target."""

    num_changed: _NATURAL
    """Words that differ from the base, or from zero if the base does not have the tensor."""


class File(msgspec.Struct, frozen=True, array_like=True):
    """One file of the target."""

    path: str
    rows: tuple[_NATURAL, ...]
    """Rows of the target table in the order of their bytes, the plain bytes first."""


class ExtentRecord(msgspec.Struct, frozen=True, array_like=True):
    """A run of words of the target table, encoded as one payload."""

    row: _NATURAL
    first_word: _NATURAL
    """Offset in that row; the run may continue in the following rows."""
    num_words: Annotated[int, msgspec.Meta(ge=1, le=EXTENT_WORDS_MAX)]
    num_changed: _NATURAL
    codec: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=PAYLOAD_BYTES_MAX)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """blake3 of the payload."""


class TensorSlice(msgspec.Struct, frozen=True):
    """The part of an extent in one tensor."""

    row: int
    first_word: int
    num_words: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest."""

    is_folder: bool
    base: tuple[TensorRow, ...]
    target: tuple[TargetRow, ...]
    files: tuple[File, ...]
    extents: tuple[ExtentRecord, ...]

    def base_rows(self) -> dict[Key, TensorRow]:
        """Return the base table by key."""
        return {row.key: row for row in self.base}

    def offsets(self) -> list[int]:
        """Return the offsets of the payloads, and the end of the last one."""
        return list(accumulate((extent.num_bytes for extent in self.extents), initial=0))

    def pieces(self, extent: ExtentRecord) -> list[TensorSlice]:
        """Split an extent by tensor."""
        pieces: list[TensorSlice] = []
        row, first, rest = extent.row, extent.first_word, extent.num_words
        while rest:
            count = min(rest, self.target[row].num_words - first)
            if count:
                pieces.append(TensorSlice(row, first, count))
            row, first, rest = row + 1, 0, rest - count
        return pieces


def decode_manifest(data: bytes, payload_bytes: int) -> Manifest:
    """Parse and check a manifest.

    Raises:
        CorruptDataError: A field is missing, out of bounds, or contradicts another one.

    """
    try:
        manifest = parse_msgpack(data, Manifest, "delta.manifest")
    except CodecError as error:
        raise CorruptDataError(f"delta.manifest: {error}") from error
    _check_tables(manifest)
    _check_files(manifest)
    _check_extents(manifest)
    if manifest.offsets()[-1] != payload_bytes:
        raise CorruptDataError("delta.extents: their sizes do not add up to the file's")
    return manifest


def _check_tables(manifest: Manifest) -> None:
    for label, table in (("base", manifest.base), ("target", manifest.target)):
        # Two rows of one name would make it ambiguous which tensor is the base.
        if len({row.key for row in table}) != len(table):
            raise CorruptDataError(f"delta.{label}: a tensor is there twice")
        for row in table:
            try:
                num_bytes = row.num_bytes
            except ValueError as error:
                raise CorruptDataError(f"delta.{label}: {row.name!r}: {error}") from error
            if num_bytes > _TENSOR_BYTES_MAX:
                raise CorruptDataError(f"delta.{label}: {row.name!r} is too large: {num_bytes}")
    if any(row.num_changed > row.num_words for row in manifest.target):
        raise CorruptDataError("delta.target: more changed words than there are")


def _check_files(manifest: Manifest) -> None:
    if len(manifest.files) > FILES_MAX:
        raise CorruptDataError(f"delta.files: at most {FILES_MAX}, got {len(manifest.files)}")
    seen = [row for file in manifest.files for row in file.rows]
    if sorted(seen) != list(range(len(manifest.target))):
        raise CorruptDataError("delta.files: each tensor must be in one file, once")
    for file in manifest.files:
        keys = [manifest.target[row].key for row in file.rows]
        if not keys or keys[0] != (True, file.path) or any(is_bytes for is_bytes, _ in keys[1:]):
            raise CorruptDataError(f"delta.files: {file.path!r} does not begin with its own bytes")
        if not is_portable(file.path):
            raise CorruptDataError(f"delta.files: {file.path!r} is not a plain relative path")
    paths = {file.path for file in manifest.files}
    parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if paths & parents or (not manifest.is_folder and len(paths) != 1):
        raise CorruptDataError("delta.files: a file is also a folder, or one file is several")


def _check_extents(manifest: Manifest) -> None:
    # Extents have to cover the target table in order and without gaps, with one dtype each.
    lengths = [row.num_words for row in manifest.target]
    starts = list(accumulate(lengths, initial=0))
    reached = 0
    for number, extent in enumerate(manifest.extents):
        if extent.row >= len(lengths) or extent.first_word >= lengths[extent.row]:
            raise CorruptDataError(f"delta.extents: {number} begins outside of the tensors")
        begin = starts[extent.row] + extent.first_word
        if begin != reached or begin + extent.num_words > starts[-1]:
            raise CorruptDataError(f"delta.extents: {number} leaves a gap or overlaps another")
        dtypes = {manifest.target[piece.row].dtype for piece in manifest.pieces(extent)}
        num_half_bytes = (
            # Packed words count changed half bytes.
            2 * manifest.target[extent.row].element_type.dtype.traits.itemsize * extent.num_words
        )
        if len(dtypes) != 1 or extent.num_changed > num_half_bytes:
            raise CorruptDataError(f"delta.extents: {number} mixes dtypes, or changes too much")
        reached += extent.num_words
    if reached != starts[-1]:
        raise CorruptDataError("delta.extents: they do not cover every tensor")
