"""Importance ratios of sampled tokens, in the two parts that they have.

    trainer now / sampler  =  trainer at version v / sampler  x  trainer now / trainer at version v
         total             =            engine               x            staleness

v is the version that sampled a token. The engine's part says how unlike trainer and sampler
compute one policy: near 1, whatever is trained. Staleness says how far training has moved since.
Bounds that are made for the one would reject the other.

Shapes: N sampled tokens of S sequences, flat; `sequence_ids` [N] int64 ascending.
"""

from typing import NamedTuple

import torch

LOG_RATIO_MAX = 20.0
"""Log ratios are clamped to +- this, so that no exponential overflows."""


class Ratios(NamedTuple):
    """Log ratios of N sampled tokens, without gradient."""

    total: torch.Tensor
    """[N]."""
    engine: torch.Tensor
    """[N]: 0 where it is not known, so that all of `total` counts as staleness there."""
    is_measured: torch.Tensor
    """bool [N]: where the engine's part is known."""

    @property
    def staleness(self) -> torch.Tensor:
        """[N]."""
        return self.total - self.engine

    @classmethod
    def unmeasured(cls, total: torch.Tensor) -> "Ratios":
        """Return ratios of whose engine nothing is known."""
        return cls(total, torch.zeros_like(total), torch.zeros_like(total, dtype=torch.bool))


def log_ratios(proximal: torch.Tensor, behavior: torch.Tensor) -> torch.Tensor:
    """Return log r_t, [N] and [N] -> [N], clamped and without gradient."""
    return (proximal.detach() - behavior).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Sum [N] over each token's own sequence, and give the sum to each of its tokens: [N]."""
    totals = values.new_zeros(_num_sequences(sequence_ids))
    return totals.index_add_(0, sequence_ids, values)[sequence_ids]


def sequence_means(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Give each token the mean over its own sequence: [N] -> [N]."""
    return sequence_sums(values, sequence_ids) / sequence_lengths(values, sequence_ids)


def sequence_lengths(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Give each token the number of tokens of its own sequence: [N], in the dtype of `values`."""
    return sequence_sums(torch.ones_like(values), sequence_ids)


def sequence_maxima(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Give each token the maximum over its own sequence: [N] -> [N]."""
    lowest = values.new_full((_num_sequences(sequence_ids),), -torch.inf)
    return lowest.scatter_reduce_(0, sequence_ids, values, "amax")[sequence_ids]


def _num_sequences(sequence_ids: torch.Tensor) -> int:
    return int(sequence_ids[-1]) + 1 if sequence_ids.numel() else 0
