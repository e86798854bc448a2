"""The ladder over threads and over shards, by wall clock: cases in turn, several rounds, medians.

Threads share the pieces of one delta. Shards are what trainer ranks hold: each is coded by itself,
as many at a time as there are processors, so that their ratio shows what cutting costs.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from statistics import median

import msgspec
import numpy as np
from tests.lab.bench.codecs.pairs import ArrayPair, Pair

from penstock.kernels.delta import apply, encode

NUM_THREADS = (1, 2)
NUM_SHARDS = (1, 2, 8)
_NUM_ROUNDS = 9
_BYTES, _REPEATS_MAX = 1 << 26, 64


class Scaled(msgspec.Struct, frozen=True):
    """One case."""

    ratio: float
    """Size of the target over that of all payloads."""
    encode_gb_s: float
    """Bytes of the target per second of wall clock."""
    decode_gb_s: float


class _Case:
    """Pieces, repeated to a size that takes a while, and how many threads work on them."""

    def __init__(self, pieces: list[ArrayPair], num_threads: int) -> None:
        self.payloads = [encode(p.base, p.target, p.kind) for p in pieces]
        self.num_bytes = sum(p.target.nbytes for p in pieces)
        self.repeats = min(max(1, _BYTES // self.num_bytes), _REPEATS_MAX)
        self.encode_s: list[float] = []
        self.decode_s: list[float] = []
        self._pieces = pieces
        self._pool = ThreadPoolExecutor(num_threads)
        self._rooms: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(num_threads):
            self._rooms.put(np.ones(max(p.target.nbytes for p in pieces), np.uint8))

    def work(self) -> None:
        """Take one round's times."""
        self.encode_s.append(self._wall_s(self._encode))
        self.decode_s.append(self._wall_s(self._decode))

    def _wall_s(self, work: Callable[[int], None]) -> float:
        numbers = list(range(len(self._pieces))) * self.repeats
        began = time.perf_counter()
        list(self._pool.map(work, numbers))
        return (time.perf_counter() - began) / self.repeats

    def close(self) -> None:
        """End the threads; they and the memory that they work in were kept from round to round."""
        self._pool.shutdown()

    def _encode(self, number: int) -> None:
        arrays = self._pieces[number]
        encode(arrays.base, arrays.target, arrays.kind)

    def _decode(self, number: int) -> None:
        base, room = self._pieces[number].base, self._rooms.get()
        out = room[: base.nbytes].view(base.dtype).reshape(base.shape)
        apply(base, self.payloads[number], out)
        self._rooms.put(room)


def thread_scaling(pair: Pair) -> dict[str, Scaled]:
    """Measure one delta by number of threads."""
    return _measure({str(n): _Case(pair.extents, n) for n in NUM_THREADS})


def shard_scaling(pair: Pair) -> dict[str, Scaled]:
    """Measure the pair by the number of shards that it is cut into."""
    cores = len(os.sched_getaffinity(0))
    return _measure({str(n): _Case(_cut(pair, n), min(n, cores)) for n in NUM_SHARDS})


def _cut(pair: Pair, num_shards: int) -> list[ArrayPair]:
    return [
        ArrayPair(arrays.kind, base, target)
        for arrays in pair.extents
        for base, target in zip(
            np.array_split(arrays.base, num_shards),
            np.array_split(arrays.target, num_shards),
            strict=True,
        )
    ]


def _measure(cases: dict[str, _Case]) -> dict[str, Scaled]:
    for _ in range(_NUM_ROUNDS):
        for case in cases.values():
            case.work()
    for case in cases.values():
        case.close()
    return {
        name: Scaled(
            ratio=case.num_bytes / sum(map(len, case.payloads)),
            encode_gb_s=case.num_bytes / median(case.encode_s) / 1e9,
            decode_gb_s=case.num_bytes / median(case.decode_s) / 1e9,
        )
        for name, case in cases.items()
    }
