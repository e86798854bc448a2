"""Importance ratios of sampled tokens, split into two parts.

    trainer now / sampler  =  trainer at version v / sampler  x  trainer now / trainer at version v
         total             =            engine               x            staleness

v is the version that sampled a token. The engine's part is the numerical difference between trainer
and sampler at one policy, near 1 whatever is trained. Staleness is how far training has moved
since. Bounds made for one part would reject the other.

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
    """[N]: 0 where unknown, so that all of `total` counts as staleness."""
    is_measured: torch.Tensor
    """bool [N]: whether the engine's part is known."""

    @property
    def staleness(self) -> torch.Tensor:
        """[N]."""
        return self.total - self.engine

    @classmethod
    def unmeasured(cls, total: torch.Tensor) -> "Ratios":
        """Return ratios with an unknown engine part."""
        return cls(total, torch.zeros_like(total), torch.zeros_like(total, dtype=torch.bool))


def log_ratios(proximal: torch.Tensor, behavior: torch.Tensor) -> torch.Tensor:
    """Return log r_t, [N] and [N] -> [N], clamped and without gradient."""
    # Clamped before any exponential: one inf would make the whole step non-finite.
    return (proximal.detach() - behavior).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum over its sequence: [N] -> [N]."""
    totals = values.new_zeros(_num_sequences(sequence_ids))
    return totals.index_add_(0, sequence_ids, values)[sequence_ids]


def sequence_means(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean over its sequence: [N] -> [N]."""
    return sequence_sums(values, sequence_ids) / sequence_lengths(values, sequence_ids)


def sequence_lengths(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return for each token the length of its sequence: [N], in the dtype of `values`."""
    return sequence_sums(torch.ones_like(values), sequence_ids)


def sequence_maxima(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return for each token the maximum over its sequence: [N] -> [N]."""
    lowest = values.new_full((_num_sequences(sequence_ids),), -torch.inf)
    return lowest.scatter_reduce_(0, sequence_ids, values, "amax")[sequence_ids]


def _num_sequences(sequence_ids: torch.Tensor) -> int:
    return int(sequence_ids[-1]) + 1 if sequence_ids.numel() else 0
