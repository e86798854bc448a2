"""Off-policy corrections: how much each sampled token counts, by its ratio to the sampler.

r_t = proximal / behavior probability of token t. One optimizer step is taken on a batch, so the
proximal policy is the current one before the step. To add a correction: a function here, a line in
the table, and the name in `config.CORRECTIONS`.

Shapes: N sampled tokens of S sequences, flat; `sequence_ids` [N] int64 ascending, `weights` [N].
"""

from collections.abc import Callable

import torch

from penstock.actors.trainer.config import LossConfig

LOG_RATIO_MAX = 20.0
"""Log ratios are clamped to +- this, so that no exponential overflows."""

Correction = Callable[[torch.Tensor, torch.Tensor, LossConfig], torch.Tensor]
"""(log_ratio [N], sequence_ids [N], config) -> weights [N]; 0 masks a token."""


def log_ratios(proximal: torch.Tensor, behavior: torch.Tensor) -> torch.Tensor:
    """Return log r_t, [N] and [N] -> [N], clamped and without gradient."""
    return (proximal.detach() - behavior).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Sum [N] over each token's own sequence, and give the sum to each of its tokens: [N]."""
    return _totals(values, sequence_ids)[sequence_ids]


def _none(log_ratio: torch.Tensor, _ids: torch.Tensor, _config: LossConfig) -> torch.Tensor:
    return torch.ones_like(log_ratio)


def _token_tis(log_ratio: torch.Tensor, _ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """min(r_t, C)."""
    return log_ratio.exp().clamp(max=config.ratio_cap)


def _sequence_tis(log_ratio: torch.Tensor, ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """min(prod r_t, C) for all tokens of the sequence."""
    return _sequence_ratio(log_ratio, ids).clamp(max=config.ratio_cap)


def _icepop(log_ratio: torch.Tensor, _ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """r_t inside [low, high], else masked."""
    return _masked(log_ratio.exp(), log_ratio.exp(), config.ratio_low, config.ratio_high)


def _sequence_mis(log_ratio: torch.Tensor, ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Sequence TIS, and the sequence masked where prod r_t is outside [low, cap]."""
    ratio = _sequence_ratio(log_ratio, ids)
    return _masked(ratio, ratio, config.ratio_low, config.ratio_cap)


def _geometric(log_ratio: torch.Tensor, ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """1, and the sequence masked where the geometric mean of r_t is outside its bounds."""
    count = sequence_sums(torch.ones_like(log_ratio), ids)
    mean = (sequence_sums(log_ratio, ids) / count).exp()
    return _masked(torch.ones_like(mean), mean, config.geometric_low, config.geometric_high)


def _sequence_ratio(log_ratio: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return sequence_sums(log_ratio, ids).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _masked(weights: torch.Tensor, judged: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((judged >= low) & (judged <= high), weights, torch.zeros_like(weights))


def _totals(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    num_sequences = int(sequence_ids[-1]) + 1 if sequence_ids.numel() else 0
    return values.new_zeros(num_sequences).index_add_(0, sequence_ids, values)


_CORRECTIONS: dict[str, Correction] = {
    "none": _none,
    "token_tis": _token_tis,
    "sequence_tis": _sequence_tis,
    "icepop": _icepop,
    "sequence_mis": _sequence_mis,
    "geometric": _geometric,
}


def correction_weights(
    log_ratio: torch.Tensor, sequence_ids: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """Return the weight of each token under the configured correction, [N]."""
    return _CORRECTIONS[config.correction](log_ratio, sequence_ids, config)
