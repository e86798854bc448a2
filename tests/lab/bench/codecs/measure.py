"""Times the codecs in turn, several rounds, and takes medians.

Seconds are processor seconds of this process: other work on the machine does not count, threads
that a codec starts do. So a speed is that of one core. A timing spans as many times as fill a
twentieth of a second, so that a fast codec is not timed while the caches are still those of the one
before. Between two timings the process must be idle: one of the peers returns while its threads
still work.

The first touch of fresh memory can take longer than any of the codecs, so targets are written into
memory that was used before, by every codec that can write into given memory (the peers' package
cannot: what it allocates is let go after each pair, so that the allocator gives it again).
"""

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np
from tests.lab.bench.codecs.contestants import Coded, Contestant, contestants
from tests.lab.bench.codecs.pairs import ArrayPair, Pair

from penstock.kernels.delta import Dtype
from penstock.kernels.delta.dtypes import exponent_keys
from penstock.kernels.delta.portable import ordered

NUM_ROUNDS = 5
_SPAN_S, _TIMES_MAX = 0.05, 100
_IDLE_S, _IDLE_SHARE, _IDLE_TRIES = 0.01, 0.2, 200
_Result = TypeVar("_Result")


class CodecFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One codec on one pair."""

    ratio: float
    """Size of the target over that of the delta."""
    encode_gb_s: float
    """Bytes of the target per second of one core."""
    decode_gb_s: float
    """Likewise, to an array whose check was computed."""
    bit_exact: bool


class PairFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All codecs on one pair."""

    num_bytes: int
    changed_fraction: float
    entropy_bound_ratio: float
    """Bound by the entropy of mask and step, each given the base's exponent."""
    codecs: dict[str, CodecFigures]


def measure(pair: Pair, num_rounds: int = NUM_ROUNDS) -> PairFigures:
    """Measure every codec on a pair."""
    codecs = contestants(pair)
    encode_s: defaultdict[str, list[float]] = defaultdict(list)
    decode_s: defaultdict[str, list[float]] = defaultdict(list)
    coded: dict[str, list[Coded]] = {}
    by_cut = {contestant.takes_tensors: contestant.pieces(pair) for contestant in codecs.values()}
    rooms = {cut: [np.ones_like(p.target) for p in pieces] for cut, pieces in by_cut.items()}
    for _ in range(num_rounds):
        for name, contestant in codecs.items():
            own = rooms[contestant.takes_tensors]
            encoded, decoded, coded[name] = _round(contestant, contestant.pieces(pair), own)
            encode_s[name].append(encoded)
            decode_s[name].append(decoded)
    changed = sum(int(np.count_nonzero(p.base != p.target)) for p in pair.tensors)
    return PairFigures(
        num_bytes=pair.num_bytes,
        changed_fraction=changed / sum(p.base.size for p in pair.tensors),
        entropy_bound_ratio=pair.num_bytes / max(1.0, _entropy_bound_bytes(pair)),
        codecs={
            name: CodecFigures(
                ratio=pair.num_bytes / sum(one.num_bytes for one in coded[name]),
                encode_gb_s=pair.num_bytes / median(encode_s[name]) / 1e9,
                decode_gb_s=pair.num_bytes / median(decode_s[name]) / 1e9,
                bit_exact=_is_exact(
                    contestant,
                    contestant.pieces(pair),
                    coded[name],
                    rooms[contestant.takes_tensors],
                ),
            )
            for name, contestant in codecs.items()
        },
    )


def _round(
    contestant: Contestant, pieces: list[ArrayPair], rooms: list[np.ndarray]
) -> tuple[float, float, list[Coded]]:
    """Return the seconds of encoding and decoding, and what was encoded."""
    encode_s, coded = _timed(lambda: [contestant.encode(arrays) for arrays in pieces])
    decode_s, _ = _timed(
        lambda: [
            contestant.decode(arrays, one.body, out)
            for arrays, one, out in zip(pieces, coded, rooms, strict=True)
        ]
    )
    return encode_s, decode_s, coded


def _timed(work: Callable[[], _Result]) -> tuple[float, _Result]:
    """Repeat work for `_SPAN_S` at least; return the mean seconds, and its result."""
    _wait_idle()
    began = time.process_time()
    result, times = work(), 1
    while time.process_time() - began < _SPAN_S and times < _TIMES_MAX:
        result, times = work(), times + 1
    return (time.process_time() - began) / times, result


def _is_exact(
    contestant: Contestant, pieces: list[ArrayPair], coded: list[Coded], rooms: list[np.ndarray]
) -> bool:
    """Decode once more, over memory that holds nothing of the targets."""
    for room in rooms:
        room.fill(0)
    return all(
        np.array_equal(arrays.target, contestant.decode(arrays, one.body, out))
        for arrays, one, out in zip(pieces, coded, rooms, strict=True)
    )


def _wait_idle() -> None:
    """Wait until no thread of this process works, two seconds at most."""
    for _ in range(_IDLE_TRIES):
        began = time.process_time()
        time.sleep(_IDLE_S)
        if time.process_time() - began < _IDLE_S * _IDLE_SHARE:
            return


def _entropy_bound_bytes(pair: Pair) -> float:
    """Add up the bounds of the element types, each over all tensors together."""
    kinds = {
        arrays.kind: [p for p in pair.tensors if p.kind is arrays.kind] for arrays in pair.tensors
    }
    return sum(
        entropy_bound_bytes(
            np.concatenate([p.base for p in own]), np.concatenate([p.target for p in own]), kind
        )
        for kind, own in kinds.items()
    )


def entropy_bound_bytes(base: np.ndarray, target: np.ndarray, kind: Dtype = Dtype.BF16) -> float:
    """Return the entropy of the mask and of the step, each given the base's exponent, in bytes.

    Args:
        base: [N] bit patterns.
        target: [N] bit patterns.
        kind: what they are.

    """
    keys = exponent_keys(base, kind)
    steps = ordered(target) - ordered(base) if kind.traits.is_float else target - base
    bits = 0.0
    for key in np.unique(keys):
        _, counts = np.unique(steps[keys == key], return_counts=True)
        bits -= float(np.sum(counts * np.log2(counts / counts.sum())))
    return bits / 8
