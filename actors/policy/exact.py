"""Forward pass of the trainer in the sampler's own arithmetic: no mismatch, to the bit.

The compiled step (`kernels/decode`) gives a token the same bits in any batch, chunk or cache. Here
it runs the tokens of a packed tree, so the trainer gets the logprobs that the engine sampled with.
Gradients come from torch, taken at each layer's exact input: `TakeValue` replaces torch's values,
which differ only in the last bits, with the exact ones.

The first child of a piece continues in its parent's cache row; its siblings get copies.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from penstock.actors.policy.config import ExactModeError, PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.native import decode_shape, has_wide_routes, pack_policy
from penstock.actors.policy.packing import PackedTree
from penstock.kernels.decode.kernel import DecodeKernel, Trace
from penstock.kernels.decode.layout import StepCache, round_up

_CHUNK_TOKENS = 512
"""Tokens per call, so that the data of a call stays in the CPU cache. Affects time, never bits."""


@dataclass(frozen=True, kw_only=True)
class ExactPass:
    """Results of the compiled step for T packed tokens and N requested logprobs."""

    states: torch.Tensor
    """Output of each layer, [L, T, d]."""
    routed_experts: torch.Tensor
    """Experts that were used, int64 [T, L, K]."""
    logprobs: torch.Tensor
    """Requested logprobs, float32 [N]."""
    flips: np.ndarray
    """Counts of replayed experts per layer, [L, 2]; see `kernels.decode.Trace`."""


@dataclass(frozen=True, kw_only=True)
class LogprobRequest:
    """The N logprobs that a pass over a tree should return, and their distribution."""

    rows: np.ndarray
    """Indices in the tree of the tokens before the targets, int64 [N]."""
    targets: np.ndarray
    """Tokens whose logprobs are wanted, int64 [N]."""
    temperatures: np.ndarray
    """Temperatures of the sampler, float64 [N], > 0."""
    shape: Callable[[torch.Tensor], torch.Tensor]
    """Function that shapes logits [N, V] as the sampler did, except for the temperature
    (`shaping.py`)."""

    @classmethod
    def plain(cls, rows: np.ndarray, targets: np.ndarray) -> "LogprobRequest":
        """Request logprobs of the unshaped policy at temperature 1."""
        return cls(
            rows=rows,
            targets=targets,
            temperatures=np.ones(len(rows)),
            shape=lambda logits: logits,
        )


class ExactForward:
    """Runs packed trees with one set of weights; threads may share it."""

    def __init__(self, policy: Policy, plausible: float = 0.0) -> None:
        """Pack a copy of the policy's current weights.

        Args:
            policy: Policy whose weights are copied.
            plausible: Threshold for replayed experts, as in `NumericsConfig`.

        """
        self._config = policy.config
        self._plausible = plausible
        self._weights = pack_policy(policy)

    def run(self, tree: PackedTree, wanted: LogprobRequest) -> ExactPass:
        """Run a tree, replaying its recorded routes.

        Args:
            tree: Packed tree of T tokens.
            wanted: The N logprobs to return.

        Raises:
            ExactModeError: The step cannot be compiled here or does not support the policy's shape.

        """
        places = _Places.of(tree)
        kernel = self._kernel(places)
        cache = _Cache.empty(self._config, places)
        extended = StepCache(cache.kv, cache.routes)
        # Sequences that part after a shared token all want its logits: compute them only once.
        read_rows, inverse = np.unique(wanted.rows, return_inverse=True)
        logits = np.empty((len(read_rows), self._config.vocab_size), np.float32)
        num_layers, total = self._config.num_hidden_layers, len(tree.input_ids)
        states = np.empty((num_layers, total, self._config.hidden_size), np.float32)
        flips = np.zeros((num_layers, 2), np.int32)
        for tokens in cache.filled(places):
            trace = Trace(
                states=np.empty((num_layers, len(tokens), states.shape[2]), np.float32),
                flips=flips,
                replay=tree.routed_experts[tokens].astype(np.int16),
                plausible=self._plausible,
            )
            ids, cache_rows, positions = (
                values[tokens].astype(np.int32)
                for values in (tree.input_ids, places.rows, places.positions)
            )
            outputs = np.flatnonzero(np.isin(tokens, read_rows)).astype(np.int32)
            placed = (ids, cache_rows, positions)
            found = kernel.step(self._weights, extended, placed, outputs, trace=trace)
            logits[np.searchsorted(read_rows, tokens[outputs])] = found
            states[:, tokens] = trace.states
        drawn_from = wanted.shape(torch.from_numpy(logits[inverse])).contiguous().numpy()
        chosen = wanted.targets.astype(np.int32)
        logprobs = kernel.logprobs(drawn_from, wanted.temperatures, chosen)
        return ExactPass(
            states=torch.from_numpy(states),
            routed_experts=torch.from_numpy(cache.routes[places.rows, places.positions]).long(),
            logprobs=torch.from_numpy(logprobs),
            flips=flips,
        )

    def _kernel(self, places: "_Places") -> DecodeKernel:
        shape = decode_shape(self._config, places.num_rows, places.num_positions)
        kernel = DecodeKernel.load(shape)
        if kernel is None:
            raise ExactModeError(
                "policy.numerics.mode: 'exact' needs a C compiler, and a policy whose hidden_size, "
                "head_dim and moe_intermediate_size are multiples of 16"
            )
        return kernel


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Positions of a tree's tokens in the cache."""

    rows: np.ndarray
    """Cache row of each token, [T]."""
    positions: np.ndarray
    """Position of each token in its own sequence, [T]."""
    levels: list[np.ndarray]
    """Tokens by the depth of their piece; a level depends only on earlier levels."""
    copies: list[list[tuple[int, int, int]]]
    """Prefixes to copy before each level, as (source row, target row, number of positions)."""
    num_rows: int
    num_positions: int

    @classmethod
    def of(cls, tree: PackedTree) -> "_Places":
        """Assign cache rows, one per leaf of the tree."""
        first = np.concatenate([[0], np.cumsum(tree.lengths)])
        rows, starts, depths = [], [], []
        heirs: set[int] = set()
        levels: list[list[np.ndarray]] = []
        copies: list[list[tuple[int, int, int]]] = []
        num_rows = 0
        for piece, parent in enumerate(tree.parents):
            depth = 0 if parent < 0 else depths[parent] + 1
            start = 0 if parent < 0 else starts[parent] + tree.lengths[parent]
            # Only the first child may extend the parent's row; it would overwrite its siblings.
            inherits = parent >= 0 and parent not in heirs
            heirs.add(parent)
            row = rows[parent] if inherits else num_rows
            num_rows += not inherits
            if depth == len(levels):
                levels.append([])
                copies.append([])
            if parent >= 0 and not inherits:
                copies[depth].append((rows[parent], row, round_up(start)))
            levels[depth].append(np.arange(first[piece], first[piece + 1]))
            rows.append(row)
            starts.append(start)
            depths.append(depth)
        offsets = np.repeat(np.array(starts) - first[:-1], tree.lengths)
        positions = np.arange(first[-1]) + offsets
        return cls(
            rows=np.repeat(rows, tree.lengths),
            positions=positions,
            levels=[np.concatenate(level) for level in levels],
            copies=copies,
            num_rows=num_rows,
            num_positions=round_up(int(positions.max()) + 1),
        )


@dataclass(frozen=True, kw_only=True)
class _Cache:
    """KV cache and routes of one tree."""

    kv: np.ndarray
    routes: np.ndarray

    @classmethod
    def empty(cls, config: PolicyConfig, places: _Places) -> "_Cache":
        rows, positions = places.num_rows, places.num_positions
        layers, heads = config.num_hidden_layers, 2 * config.num_key_value_heads
        routes_dtype = np.int16 if has_wide_routes(config) else np.uint8
        return cls(
            # Not zeroed: every position is written before it is read.
            kv=np.empty((layers, rows, heads, positions, config.head_dim), np.float32),
            routes=np.empty((rows, positions, layers, config.num_experts_per_tok), routes_dtype),
        )

    def filled(self, places: _Places) -> Iterator[np.ndarray]:
        """Yield the tokens to compute next, after copying the prefixes that they need."""
        for tokens, copies in zip(places.levels, places.copies, strict=True):
            for source, target, count in copies:
                self.kv[:, target, :, :count] = self.kv[:, source, :, :count]
            yield from np.array_split(tokens, -(-len(tokens) // _CHUNK_TOKENS))
