"""The cost of recording routes for a sampler: the same decoding step with and without it.

A pair is four steps of the same tokens at the same positions: with, without, without, with, so that
drift affects both equally. Times are the thread's CPU time, which excludes other threads. The
result is the median ratio of many pairs, with a bootstrap interval.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.actors.generator.actor import seal_chunk
from penstock.actors.generator.engine import TokenChunk
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.native import decode_shape, pack_policy
from penstock.kernels.decode.kernel import DecodeKernel
from penstock.kernels.decode.layout import StepCache, round_up
from penstock.messages.errors import NotFoundError
from penstock.messages.rollout import VersionSpan

_CONTEXT = 128
"""Positions that attention reads, as at the start of `python -m tests.lab engine`."""
_SEALED_TOKENS = 256
_NUM_SEALS = 50
_NUM_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)
"""Percent."""


def measure_recording(policy: Policy, num_pairs: Mapping[int, int]) -> dict[str, Any]:
    """Return the cost of recording in the decoding step, and of sealing recorded routes.

    Args:
        policy: Policy with the shape; the weights do not matter.
        num_pairs: Number of pairs by batch size.

    Returns:
        `step`: by batch size `ratio` (time with recording / without), `ratio_low`, `ratio_high`
        (95%), `step_us`, `num_pairs`. `seal_us_per_token`: packing and checksum, once per turn,
        outside of the step. `bytes_per_token`: `engine` (in its cache) and `sealed`.

    Raises:
        NotFoundError: The compiled step cannot be built here.

    """
    step = {str(batch): _Step(policy, batch).compare(count) for batch, count in num_pairs.items()}
    return {"step": step, **_measure_sealing(policy.config)}


class _Step:
    """One decoding step of a full batch."""

    def __init__(self, policy: Policy, batch: int) -> None:
        config = policy.config
        num_positions = round_up(min(_CONTEXT + 1, config.max_position_embeddings))
        shape = decode_shape(config, batch, num_positions)
        kernel = DecodeKernel.load(shape)
        if kernel is None:
            raise NotFoundError("recording: the compiled step needs a C compiler")
        self._kernel, self._weights = kernel, pack_policy(policy)
        layers, heads = config.num_hidden_layers, 2 * config.num_key_value_heads
        kv = np.zeros((layers, batch, heads, num_positions, config.head_dim), np.float32)
        size = (batch, num_positions, layers, config.num_experts_per_tok)
        routes = np.zeros(size, np.int16 if shape.wide_routes else np.uint8)
        self._recording, self._plain = StepCache(kv, routes), StepCache(kv, None)
        self._rows = np.arange(batch, dtype=np.int32)
        self._token_ids = np.random.default_rng(0).integers(0, config.vocab_size, batch, np.int32)
        self._positions = np.full(batch, num_positions - 1, np.int32)

    def compare(self, num_pairs: int) -> dict[str, float]:
        """Time pairs, after a tenth more for warm-up."""
        # The first pairs fill caches.
        pairs = np.array([self._pair() for _ in range(num_pairs + num_pairs // 10)])
        with_s, without_s = pairs[num_pairs // 10 :].T
        ratios = with_s / without_s
        rng = np.random.default_rng(0)
        drawn = rng.choice(ratios, (_NUM_RESAMPLES, num_pairs))
        low, high = np.percentile(np.median(drawn, axis=1), _INTERVAL)
        return {
            "ratio": float(np.median(ratios)),
            "ratio_low": float(low),
            "ratio_high": float(high),
            "step_us": float(np.median(without_s)) / 2 * 1e6,
            "num_pairs": num_pairs,
        }

    def _pair(self) -> tuple[float, float]:
        """Return how many seconds two steps take with recording, and two without."""
        first, *between, last = (self._time_s(records=on) for on in (True, False, False, True))
        return first + last, sum(between)

    def _time_s(self, *, records: bool) -> float:
        cache = self._recording if records else self._plain
        tokens = (self._token_ids, self._rows, self._positions)
        started = time.thread_time()
        self._kernel.step(self._weights, cache, tokens, self._rows)
        return time.thread_time() - started


def _measure_sealing(config: PolicyConfig) -> dict[str, Any]:
    size = (_SEALED_TOKENS, config.num_hidden_layers, config.num_experts_per_tok)
    routes = np.random.default_rng(0).integers(0, config.num_experts, size)
    cached = routes.astype(np.int16 if config.num_experts > 256 else np.uint8)
    chunk = TokenChunk(
        token_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        policy_version=0,
        routed_experts=cached,
        route_spans=(VersionSpan(policy_version=0, num_tokens=_SEALED_TOKENS),),
    )
    times_s: list[float] = []
    sealed = 0
    for _ in range(_NUM_SEALS):
        started = time.thread_time()
        sealed = sum(map(len, seal_chunk(chunk, config.num_experts)))
        times_s.append(time.thread_time() - started)
    return {
        "seal_us_per_token": float(np.median(times_s)) / _SEALED_TOKENS * 1e6,
        "bytes_per_token": {
            "engine": cached.nbytes / _SEALED_TOKENS,
            "sealed": sealed / _SEALED_TOKENS,
        },
    }
