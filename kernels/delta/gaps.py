"""Marks: some places among many, as the gaps between them.

Changed weights lie scattered with a nearly constant density, so the gaps between them are
geometric: the high part of a gap is one byte for the entropy coder, the low `shift` bits, which are
close to random, are kept apart as plain bits. The shift grows with the mean gap, so that the byte
is rarely over its limit at any density. Where more than half is marked, the rest is coded.
"""

import msgspec
import numpy as np

ESCAPE = 255
"""A gap byte that says: the high part stands in the escapes, as u32."""
SHIFT_MAX = 28
STREAMS_PER_MARKS = 3
_MEAN_HIGH = 8


class MarksRecord(msgspec.Struct, frozen=True):
    """What the reader of marks must know beforehand."""

    shift: int
    """Low bits of a gap that are kept apart."""
    inverted: bool
    """The coded places are those without a mark."""
    num_coded: int


def encode_marks(marked: np.ndarray, population: int) -> tuple[MarksRecord, list[bytes]]:
    """Code which of `population` places are marked.

    Args:
        marked: [M] int64, strictly rising, in 0 .. population-1.
        population: number of places.

    Returns:
        The record; then one byte a gap, the packed low bits, the escaped high parts.

    """
    inverted = 2 * marked.size > population
    coded = complement(marked, population) if inverted else marked
    shift = max(0, (population // max(1, coded.size) // _MEAN_HIGH).bit_length() - 1)
    gaps = np.diff(coded, prepend=-1) - 1
    high = gaps >> shift
    codes = np.minimum(high, ESCAPE).astype(np.uint8)
    escapes = high[codes == ESCAPE].astype("<u4")
    record = MarksRecord(shift, inverted, coded.size)
    return record, [codes.tobytes(), _pack_low(gaps, shift), escapes.tobytes()]


def decode_marks(record: MarksRecord, streams: list[bytes], population: int) -> np.ndarray:
    """Invert `encode_marks`.

    Raises:
        ValueError: the streams contradict the record or the population.

    """
    codes, low = np.frombuffer(streams[0], np.uint8), np.frombuffer(streams[1], np.uint8)
    if codes.size != record.num_coded:
        raise ValueError(f"{codes.size} gaps for {record.num_coded} places")
    high = codes.astype(np.int64)
    high[codes == ESCAPE] = np.frombuffer(streams[2], "<u4")
    gaps = (high << record.shift) + _unpack_low(low, record.shift, codes.size)
    coded = np.cumsum(gaps + 1) - 1
    if coded.size and (coded.min() < 0 or coded.max() >= population):
        raise ValueError(f"a place lies outside of the {population}")
    return complement(coded, population) if record.inverted else coded


def complement(places: np.ndarray, population: int) -> np.ndarray:
    """Return all other places, rising."""
    is_kept = np.ones(population, np.bool_)
    is_kept[places] = False
    return np.flatnonzero(is_kept)


def pack_bits(bits: np.ndarray) -> bytes:
    """Pack bits, the first into the lowest."""
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bits(data: np.ndarray, count: int) -> np.ndarray:
    """Invert `pack_bits`: return bool [count].

    Raises:
        ValueError: the bytes are not as many as `count` bits need.

    """
    if data.size != (count + 7) // 8:
        raise ValueError(f"expected {(count + 7) // 8} bytes of bits, got {data.size}")
    return np.unpackbits(data, count=count, bitorder="little").view(np.bool_)


def _pack_low(gaps: np.ndarray, shift: int) -> bytes:
    if shift == 0:
        return b""
    bits = np.unpackbits(gaps.astype("<u4").view(np.uint8).reshape(-1, 4), 1, bitorder="little")
    return pack_bits(bits[:, :shift])


def _unpack_low(low: np.ndarray, shift: int, num_coded: int) -> np.ndarray:
    bits = np.zeros((num_coded, 32), np.uint8)
    bits[:, :shift] = unpack_bits(low, num_coded * shift).reshape(num_coded, shift)
    return np.packbits(bits, 1, bitorder="little").view("<u4").reshape(-1).astype(np.int64)
