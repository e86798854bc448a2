"""Which tokens could be drawn: one bit for each token of the vocabulary, sealed for the log.

A sampler that leaves tokens out (top-k, top-p, min-p, a grammar) draws from what is left,
renormalized. At other weights another set would be left, so the trainer takes the sampler's own.
A sealed segment is a zstd frame with a checksum; its bits are of consecutive tokens.
"""

from collections.abc import Sequence

import numpy as np
import zstandard

from penstock.messages.errors import CorruptDataError

_LEVEL = 1


def row_bytes(vocab_size: int) -> int:
    """Return the bytes of one token's bits."""
    return -(-vocab_size // 8)


def pack_support(is_allowed: np.ndarray) -> np.ndarray:
    """Pack bool [N, V] into uint8 [N, row_bytes(V)], the first token in the lowest bit."""
    return np.packbits(is_allowed, axis=-1, bitorder="little")


def unpack_support(bits: np.ndarray, vocab_size: int) -> np.ndarray:
    """Undo `pack_support`: uint8 [N, row_bytes(V)] to bool [N, V]."""
    return np.unpackbits(bits, axis=-1, count=vocab_size, bitorder="little").view(bool)


def seal_support(bits: np.ndarray) -> bytes:
    """Seal uint8 [N, row_bytes(V)]; no bytes for no token."""
    if not bits.size:
        return b""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return compressor.compress(np.ascontiguousarray(bits).tobytes())


def open_support(segments: Sequence[bytes], num_tokens: int, vocab_size: int) -> np.ndarray:
    """Join segments to the bits of N tokens.

    Returns:
        uint8 [N, row_bytes(V)].

    Raises:
        CorruptDataError: They are damaged, or not the bits of as many tokens; no more memory than
            those take is used.

    """
    width = row_bytes(vocab_size)
    left = num_tokens * width
    parts: list[bytes] = []
    for segment in segments:
        try:
            size = zstandard.frame_content_size(segment)
            if not 0 < size <= left:
                raise CorruptDataError(f"support: expected {num_tokens} rows of {width} bytes")
            parts.append(zstandard.ZstdDecompressor().decompress(segment))
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"support: {error}") from error
        left -= size
    if left:
        raise CorruptDataError(f"support: {left} bytes short of {num_tokens} rows of {width}")
    return np.frombuffer(b"".join(parts), np.uint8).reshape(num_tokens, width)
