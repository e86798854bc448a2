"""Sets of tokens that could be sampled, as bit masks over the vocabulary, sealed for the log.

A sampler that excludes tokens (by top-k, top-p, min-p or a grammar) renormalizes over the rest.
With other weights it would exclude other tokens, so the trainer uses the sampler's recorded set.
A sealed segment is a zstd frame with a checksum that holds the masks of consecutive tokens.
"""

from collections.abc import Sequence

import numpy as np
import zstandard

from penstock.messages.errors import CorruptDataError

_LEVEL = 1


def row_bytes(vocab_size: int) -> int:
    """Return the number of bytes of one position's mask."""
    return -(-vocab_size // 8)


def pack_support(is_allowed: np.ndarray) -> np.ndarray:
    """Pack bool [N, V] into uint8 [N, row_bytes(V)], with the first token in the lowest bit."""
    return np.packbits(is_allowed, axis=-1, bitorder="little")


def unpack_support(bits: np.ndarray, vocab_size: int) -> np.ndarray:
    """Unpack uint8 [N, row_bytes(V)], made by `pack_support`, into bool [N, V]."""
    return np.unpackbits(bits, axis=-1, count=vocab_size, bitorder="little").view(bool)


def seal_support(bits: np.ndarray) -> bytes:
    """Seal masks uint8 [N, row_bytes(V)]; return no bytes for N = 0."""
    if not bits.size:
        return b""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return compressor.compress(np.ascontiguousarray(bits).tobytes())


def open_support(segments: Sequence[bytes], num_tokens: int, vocab_size: int) -> np.ndarray:
    """Open and join segments that hold the masks of N positions.

    Returns:
        Masks uint8 [N, row_bytes(V)].

    Raises:
        CorruptDataError: A segment is damaged, or the segments do not hold exactly N masks.

    """
    width = row_bytes(vocab_size)
    left = num_tokens * width
    parts: list[bytes] = []
    for segment in segments:
        try:
            # Checked before decompressing, so that a forged frame cannot use up memory.
            size = zstandard.frame_content_size(segment)
            if not 0 < size <= left:
                raise CorruptDataError(f"support: expected {num_tokens} rows of {width} bytes")
            parts.append(zstandard.ZstdDecompressor().decompress(segment))
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"support: {error}") from error
        left -= size
    if left:
        raise CorruptDataError(
            f"support: expected {num_tokens} rows of {width} bytes, {left} bytes are missing"
        )
    return np.frombuffer(b"".join(parts), np.uint8).reshape(num_tokens, width)
