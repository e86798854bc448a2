"""The compiled inference step: same interface and results as `Decoder`, several times as fast.

Sums run in a fixed order, so a token gets the same bits in any batch. Rows are independent of each
other, so each thread takes its share of the rows through all layers.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.actors.generator.decoders.packed import StepBatch
from penstock.actors.generator.kv_cache import SlotCache
from penstock.actors.generator.sampler import SamplingBatch
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.native import decode_shape, pack_policy
from penstock.kernels.decode.kernel import DecodeKernel
from penstock.kernels.decode.layout import DecodeWeights, StepCache

_SPLIT_TOKENS = 8
"""Minimum tokens in a step for which a second thread is worthwhile."""


class NativeDecoder:
    """Runs steps of a policy over a KV cache with `penstock.kernels.decode`."""

    name = "native"

    def __init__(self, kernels: list[DecodeKernel], config: PolicyConfig, cache: SlotCache) -> None:
        """Use one thread per kernel.

        Args:
            kernels: Compiled kernels, at least one; each has its own scratch memory.
            config: Shape of the policy.
            cache: KV cache that the steps extend.

        """
        self._kernels = kernels
        self._vocab_size = config.vocab_size
        self._cache = StepCache(cache.kv.numpy(), cache.routes.numpy())
        self._pool = ThreadPoolExecutor(max(1, len(kernels) - 1), "decode")

    @classmethod
    def load(
        cls, config: PolicyConfig, cache: SlotCache, num_threads: int
    ) -> "NativeDecoder | None":
        """Return a decoder, or None if the kernel cannot be compiled or does not fit the policy."""
        # The compiled step has no nvfp4.
        if config.numerics.expert_format == "nvfp4":
            return None
        shape = decode_shape(config, len(cache.rows), cache.num_tokens_max)
        kernels = [DecodeKernel.load(shape) for _ in range(num_threads)]
        loaded = [kernel for kernel in kernels if kernel is not None]
        return cls(loaded, config, cache) if loaded else None

    @staticmethod
    def prepare(policy: Policy) -> DecodeWeights:
        """Return the weights that `step` takes: a packed copy of the parameters."""
        return pack_policy(policy)

    def step(self, weights: DecodeWeights, batch: StepBatch) -> np.ndarray:
        """Append the tokens of the batch to the cache.

        Returns:
            Logits of the output tokens, float32 [len(output_rows), V].

        """
        rows, positions = (np.array(values, dtype=np.int32) for values in batch.places())
        tokens = (np.array(batch.token_ids, dtype=np.int32), rows, positions)
        outputs = np.array(batch.output_rows, dtype=np.int32)
        num_shares = len(self._kernels) if len(rows) >= _SPLIT_TOKENS else 1
        if num_shares == 1:
            return self._run(0, weights, tokens, outputs)
        logits = np.empty((len(outputs), self._vocab_size), dtype=np.float32)
        # By row: the tokens of one prefill chunk depend on each other and must share a thread.
        owners = rows % num_shares

        def run(share: int) -> None:
            mine = np.flatnonzero(owners == share).astype(np.int32)
            is_mine = owners[outputs] == share
            local = np.searchsorted(mine, outputs[is_mine]).astype(np.int32)
            taken = (tokens[0][mine], tokens[1][mine], tokens[2][mine])
            if len(mine):
                logits[is_mine] = self._run(share, weights, taken, local)

        others = [self._pool.submit(run, share) for share in range(1, num_shares)]
        # This thread takes the first share itself, so N kernels need only N - 1 pool threads.
        run(0)
        for other in others:
            other.result()
        return logits

    def sample(self, logits: np.ndarray, batch: SamplingBatch) -> tuple[list[int], list[float]]:
        """See `sampler.sample`."""
        return self._kernels[0].sample(logits, batch.temperatures, batch.uniforms)

    def _run(
        self,
        share: int,
        weights: DecodeWeights,
        tokens: tuple[np.ndarray, np.ndarray, np.ndarray],
        outputs: np.ndarray,
    ) -> np.ndarray:
        return self._kernels[share].step(weights, self._cache, tokens, outputs)
