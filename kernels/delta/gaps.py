"""Positions as gaps.

Changed positions lie scattered with a nearly constant density, so the gaps between them are
geometric: the high part of a gap is one byte for the entropy coder, the low `shift` bits, which are
close to random, are kept apart as plain bits. The shift grows with the mean gap, so that the byte
is rarely over its limit at any density.
"""

import numpy as np

ESCAPE = 255
"""A gap byte that says: the high part stands in the escapes, as u32."""
_MEAN_HIGH = 8


def choose_shift(population: int, num_coded: int) -> int:
    """Return how many low bits to keep apart, for a mean high part of 8 to 16."""
    return max(0, (population // max(1, num_coded) // _MEAN_HIGH).bit_length() - 1)


def encode_gaps(positions: np.ndarray, shift: int) -> tuple[bytes, bytes, bytes]:
    """Code rising positions.

    Args:
        positions: [M] int64, strictly rising, from 0.
        shift: low bits to keep apart.

    Returns:
        M gap bytes; the low bits, packed little-endian; the escaped high parts.

    """
    gaps = np.diff(positions, prepend=-1) - 1
    high = gaps >> shift
    codes = np.minimum(high, ESCAPE).astype(np.uint8)
    return codes.tobytes(), _pack_low(gaps, shift), high[codes == ESCAPE].astype("<u4").tobytes()


def decode_gaps(codes: np.ndarray, low: np.ndarray, escapes: np.ndarray, shift: int) -> np.ndarray:
    """Invert `encode_gaps`.

    Raises:
        ValueError: the escapes or low bits are not as many as the codes say.

    """
    high = codes.astype(np.int64)
    high[codes == ESCAPE] = escapes
    gaps = (high << shift) + _unpack_low(low, shift, codes.size)
    return np.cumsum(gaps + 1) - 1


def low_bytes(num_coded: int, shift: int) -> int:
    """Return the length of the packed low bits."""
    return (num_coded * shift + 7) // 8


def _pack_low(gaps: np.ndarray, shift: int) -> bytes:
    if shift == 0:
        return b""
    bits = np.unpackbits(gaps.astype("<u4").view(np.uint8).reshape(-1, 4), 1, bitorder="little")
    return np.packbits(bits[:, :shift], bitorder="little").tobytes()


def _unpack_low(low: np.ndarray, shift: int, num_coded: int) -> np.ndarray:
    if low.size != low_bytes(num_coded, shift):
        raise ValueError(f"expected {low_bytes(num_coded, shift)} bytes of low bits")
    bits = np.zeros((num_coded, 32), np.uint8)
    if shift:
        unpacked = np.unpackbits(low, count=num_coded * shift, bitorder="little")
        bits[:, :shift] = unpacked.reshape(num_coded, shift)
    return np.packbits(bits, 1, bitorder="little").view("<u4").reshape(-1).astype(np.int64)
