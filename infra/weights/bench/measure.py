"""Times the codecs in turn, several rounds, and takes medians.

Seconds are processor seconds of this process: other work on the machine does not count, threads
that a codec starts do. So a speed is that of one core. Between two timings the process must be
idle: one of the peers returns while its threads still work.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import msgspec
import numpy as np

from penstock.infra.weights.bench.contestants import Contestant, contestants
from penstock.infra.weights.bench.entropy import entropy_bound_bytes
from penstock.infra.weights.bench.pairs import Pair, Piece
from penstock.kernels.delta import apply, encode

NUM_ROUNDS = 5
_SCALING_BYTES = 1 << 26
_IDLE_S, _IDLE_SHARE, _IDLE_TRIES = 0.01, 0.2, 200


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One codec on one pair."""

    ratio: float
    """Size of the target over that of the delta."""
    encode_gb_s: float
    """Bytes of the target, a second of one core."""
    decode_gb_s: float
    """The same, to an array whose check was computed."""
    bit_exact: bool


class PairFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All codecs on one pair."""

    num_bytes: int
    changed_fraction: float
    entropy_bound_ratio: float
    """Of mask and step, each given the base's exponent."""
    codecs: dict[str, Figures]


def measure(pair: Pair, num_rounds: int = NUM_ROUNDS) -> PairFigures:
    """Measure every codec on a pair."""
    ways = contestants(pair)
    encode_s: defaultdict[str, list[float]] = defaultdict(list)
    decode_s: defaultdict[str, list[float]] = defaultdict(list)
    sizes: dict[str, int] = {}
    is_exact: dict[str, bool] = {}
    for _ in range(num_rounds):
        for name, way in ways.items():
            encoded, decoded, sizes[name], is_exact[name] = _round(way, way.pieces(pair))
            encode_s[name].append(encoded)
            decode_s[name].append(decoded)
    changed = sum(int(np.count_nonzero(p.base != p.target)) for p in pair.tensors)
    return PairFigures(
        num_bytes=pair.num_bytes,
        changed_fraction=changed / sum(p.base.size for p in pair.tensors),
        entropy_bound_ratio=pair.num_bytes / max(1.0, _entropy_bound_bytes(pair)),
        codecs={
            name: Figures(
                ratio=pair.num_bytes / sizes[name],
                encode_gb_s=pair.num_bytes / median(encode_s[name]) / 1e9,
                decode_gb_s=pair.num_bytes / median(decode_s[name]) / 1e9,
                bit_exact=is_exact[name],
            )
            for name in ways
        },
    )


def _round(way: Contestant, pieces: list[Piece]) -> tuple[float, float, int, bool]:
    """Return the seconds of encoding and decoding, the bytes, and whether all came back."""
    _wait_idle()
    began = time.process_time()
    coded = [way.encode(piece) for piece in pieces]
    encoded = time.process_time()
    _wait_idle()
    decoding = time.process_time()
    decoded = [way.decode(p, c.body) for p, c in zip(pieces, coded, strict=True)]
    ended = time.process_time()
    is_exact = all(np.array_equal(p.target, d) for p, d in zip(pieces, decoded, strict=True))
    return encoded - began, ended - decoding, sum(c.num_bytes for c in coded), is_exact


def _wait_idle() -> None:
    """Wait until no thread of this process works, two seconds at most."""
    for _ in range(_IDLE_TRIES):
        began = time.process_time()
        time.sleep(_IDLE_S)
        if time.process_time() - began < _IDLE_S * _IDLE_SHARE:
            return


def _entropy_bound_bytes(pair: Pair) -> float:
    """Add up the bounds of the kinds of elements, each over all tensors together."""
    kinds = {
        piece.kind: [p for p in pair.tensors if p.kind is piece.kind] for piece in pair.tensors
    }
    return sum(
        entropy_bound_bytes(
            np.concatenate([p.base for p in own]), np.concatenate([p.target for p in own]), kind
        )
        for kind, own in kinds.items()
    )


def thread_scaling(pair: Pair) -> dict[str, dict[str, float]]:
    """Return the ladder's GB/s by wall clock on one thread and on two."""
    repeats = max(1, _SCALING_BYTES // pair.num_bytes)
    pieces = pair.extents * repeats
    payloads = [encode(p.base, p.target, p.kind) for p in pair.extents] * repeats
    num_bytes = pair.num_bytes * repeats

    def encode_piece(number: int) -> None:
        encode(pieces[number].base, pieces[number].target, pieces[number].kind)

    def decode_piece(number: int) -> None:
        apply(pieces[number].base, payloads[number])

    return {
        str(threads): {
            "encode_gb_s": num_bytes / _wall_s(encode_piece, len(pieces), threads) / 1e9,
            "decode_gb_s": num_bytes / _wall_s(decode_piece, len(pieces), threads) / 1e9,
        }
        for threads in (1, 2)
    }


def _wall_s(work: Callable[[int], None], count: int, num_threads: int) -> float:
    seconds: list[float] = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(NUM_ROUNDS):
            began = time.perf_counter()
            list(pool.map(work, range(count)))
            seconds.append(time.perf_counter() - began)
    return median(seconds)
