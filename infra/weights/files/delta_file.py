"""A delta file: payloads, then the manifest, then a footer that locates it.

```
      0    8  magic 89 "PSWD" 0D 0A 1A, which text-mode transfers would change
      8       payloads, one after the other, in the order of the extents
              manifest: one zstd frame of msgpack
 end-64    8  offset of the manifest, u64, little-endian
     -56   8  its stored size
     -48   4  its plain size, u32
     -44   4  format version, 1
     -40  32  blake3 of magic, stored manifest and the 24 bytes before
      -8   8  magic "PSWDEND" 0A
```
The footer's digest covers the manifest, which has the digest of each payload. So one digest
identifies the whole delta, and a reader verifies only what it reads.
"""

import os
import struct
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
import zstandard
from blake3 import blake3

from penstock.infra.weights.coding import num_bytes_coded
from penstock.infra.weights.files.manifest import ExtentRecord, Manifest, decode_manifest
from penstock.infra.weights.files.paths import require_file
from penstock.kernels import delta
from penstock.messages.errors import CorruptDataError

MAGIC = b"\x89PSWD\r\n\x1a"
END_MAGIC = b"PSWDEND\n"
FORMAT_VERSION = 1
MANIFEST_BYTES_MAX = 1 << 28
MANIFEST_RATIO_MAX, MANIFEST_SLACK_BYTES = 32, 1 << 18
"""A manifest may unpack to 256 KiB plus 32 times its stored bytes. Its digests do not compress, so
that real ones reach 10 times."""
_NUMBERS = struct.Struct("<QQII")
_DIGEST_BYTES = 32
_FOOTER_BYTES = _NUMBERS.size + _DIGEST_BYTES + len(END_MAGIC)


def is_delta(path: Path) -> bool:
    """Return whether a file begins as a delta does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class DeltaWriter:
    """Writes payloads one by one, and finally the manifest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = file.write(MAGIC)

    def append(self, payload: bytes) -> bytes:
        """Write the next payload; return its digest."""
        self.num_bytes += self._file.write(payload)
        return blake3(payload).digest()

    def finish(self, manifest: Manifest) -> None:
        """Write manifest and footer."""
        plain = msgspec.msgpack.encode(manifest)
        stored = zstandard.ZstdCompressor(level=9).compress(plain)
        numbers = _NUMBERS.pack(self.num_bytes, len(stored), len(plain), FORMAT_VERSION)
        digest = blake3(MAGIC + stored + numbers).digest()
        self.num_bytes += self._file.write(stored + numbers + digest + END_MAGIC)


class DeltaFile:
    """Reads a delta file; opening it checks the manifest, reading a payload checks the payload."""

    def __init__(self, path: Path) -> None:
        """Open a delta.

        Raises:
            NotFoundError: The file does not exist.
            ConfigError: The path is not a regular file.
            CorruptDataError: The file is not a delta, truncated, damaged, or of another version.

        """
        require_file(path)
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self.num_bytes = os.fstat(self._descriptor).st_size
            self.manifest, self.digest = self._read_manifest()
        except CorruptDataError as error:
            self.close()
            raise CorruptDataError(f"{path}: {error}") from error
        except BaseException:
            self.close()
            raise
        self._offsets = self.manifest.offsets()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def payload(self, number: int) -> bytes:
        """Read the payload of an extent.

        Raises:
            CorruptDataError: The payload is damaged, or contradicts the manifest.

        """
        extent = self.manifest.extents[number]
        payload = self._read(len(MAGIC) + self._offsets[number], extent.num_bytes)
        if blake3(payload).digest() != extent.digest:
            raise CorruptDataError(f"{self.path}: payload {number} is damaged")
        word_bytes = self.manifest.target[extent.row].word_dtype.itemsize
        _check_payload(extent, word_bytes, delta.read_header(payload))
        return payload

    def _read_manifest(self) -> tuple[Manifest, str]:
        if self.num_bytes < len(MAGIC) + _FOOTER_BYTES or self._read(0, len(MAGIC)) != MAGIC:
            raise CorruptDataError("not a weights delta, or mangled in transfer")
        footer = self._read(self.num_bytes - _FOOTER_BYTES, _FOOTER_BYTES)
        numbers, digest = footer[: _NUMBERS.size], footer[_NUMBERS.size : -len(END_MAGIC)]
        # First, because a truncated transfer is the most frequent damage.
        if not footer.endswith(END_MAGIC):
            raise CorruptDataError("its end is missing: truncated, or not completely transferred")
        offset, stored_bytes, plain_bytes, version = _NUMBERS.unpack(numbers)
        if version != FORMAT_VERSION:
            raise CorruptDataError(f"delta.version: expected {FORMAT_VERSION}, got {version}")
        end = self.num_bytes - _FOOTER_BYTES
        if offset < len(MAGIC) or offset + stored_bytes != end or stored_bytes > MANIFEST_BYTES_MAX:
            raise CorruptDataError("delta.manifest: it is not where the footer says")
        stored = self._read(offset, stored_bytes)
        if blake3(MAGIC + stored + numbers).digest() != digest:
            raise CorruptDataError("delta.manifest: damaged")
        return decode_manifest(_unpack(stored, plain_bytes), offset - len(MAGIC)), digest.hex()

    def _read(self, offset: int, num_bytes: int) -> bytes:
        data = os.pread(self._descriptor, num_bytes, offset)
        if len(data) != num_bytes:
            raise CorruptDataError("cut short while it was read")
        return data


def _unpack(stored: bytes, plain_bytes: int) -> bytes:
    if plain_bytes > min(
        MANIFEST_BYTES_MAX, MANIFEST_SLACK_BYTES + MANIFEST_RATIO_MAX * len(stored)
    ):
        raise CorruptDataError(
            f"delta.manifest: {len(stored)} bytes would unpack to {plain_bytes}, which is too much"
        )
    try:
        # Checked before unpacking: the frame's header says how much memory it will take.
        if zstandard.frame_content_size(stored) != plain_bytes:
            raise CorruptDataError("delta.manifest: its size is not what the footer says")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"delta.manifest: not a zstd frame: {error}") from error


def _check_payload(extent: ExtentRecord, word_bytes: int, header: delta.Header) -> None:
    expected = (extent.num_words * word_bytes, extent.num_changed, extent.codec)
    found = (num_bytes_coded(header), header.num_changed, header.codec.name.lower())
    if expected != found:
        raise CorruptDataError(f"delta.extents: the table says {expected}, the payload {found}")
