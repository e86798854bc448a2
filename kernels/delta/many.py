"""Many arrays at once, on several threads: the compiled paths release the interpreter lock."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.kernels.delta.codec import decode, encode
from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.patches import Patch

Pair = tuple[np.ndarray, np.ndarray, Dtype]
"""Base, target, and what their elements are."""


def encode_many(pairs: Sequence[Pair], num_threads: int | None = None) -> list[bytes]:
    """Encode each pair of arrays; as many threads as processors unless said.

    Raises:
        ValueError: as `encode`, of any pair.

    """
    with _pool(num_threads) as pool:
        return list(pool.map(lambda pair: encode(*pair), pairs))


def decode_many(
    extents: Sequence[tuple[np.ndarray, bytes | memoryview]], num_threads: int | None = None
) -> list[Patch]:
    """Decode each payload against its base; nothing is written.

    Raises:
        CorruptDataError: as `decode`, of any payload.

    """
    with _pool(num_threads) as pool:
        return list(pool.map(lambda extent: decode(*extent), extents))


def _pool(num_threads: int | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads or len(os.sched_getaffinity(0)), "delta")
