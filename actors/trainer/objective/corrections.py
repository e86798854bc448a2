"""Off-policy corrections and rejections: how much each sampled token counts. Pure.

Narrow bounds (icepop, geometric) apply only to the engine's part of a ratio and truncate staleness
separately; the others apply to the whole ratio. Without staleness, all are as published.

To add one, add a function here, a line to its table, and the name to `config.CORRECTIONS` or
`config.REJECTIONS`.
"""

from collections.abc import Callable
from functools import partial

import torch

from penstock.actors.trainer.config import LossConfig
from penstock.actors.trainer.objective.ratios import (
    LOG_RATIO_MAX,
    Ratios,
    sequence_maxima,
    sequence_means,
    sequence_sums,
)

Correction = Callable[[Ratios, torch.Tensor, LossConfig], torch.Tensor]
"""(ratios, sequence_ids [N], config) -> weights [N]; 0 masks a token."""


def _none(ratios: Ratios, _ids: torch.Tensor, _config: LossConfig) -> torch.Tensor:
    return torch.ones_like(ratios.total)


def _token_tis(ratios: Ratios, _ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """min(r_t, C)."""
    return ratios.total.exp().clamp(max=config.ratio_cap)


def _sequence_tis(ratios: Ratios, ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """min(prod r_t, C) for all tokens of the sequence."""
    return _sequence_ratio(ratios, ids).clamp(max=config.ratio_cap)


def _icepop(ratios: Ratios, _ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """e_t min(s_t, C) where the engine's e_t is inside [low, high], else masked."""
    engine = ratios.engine.exp()
    weights = engine * _truncated_staleness(ratios, config)
    return _masked(weights, engine, config.ratio_low, config.ratio_high)


def _sequence_mis(ratios: Ratios, ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Sequence TIS, and the sequence masked where prod r_t is outside [low, cap]."""
    ratio = _sequence_ratio(ratios, ids)
    return _masked(ratio, ratio, config.ratio_low, config.ratio_cap)


def _geometric(ratios: Ratios, ids: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """min(s_t, C), and the sequence masked where the geometric mean of its e_t is out of bounds."""
    # Over measured tokens only; unmeasured ones have an engine part of 0.
    count = sequence_sums(ratios.is_measured.to(ratios.engine.dtype), ids).clamp(min=1.0)
    mean = (sequence_sums(ratios.engine, ids) / count).exp()
    weights = _truncated_staleness(ratios, config)
    return _masked(weights, mean, config.geometric_low, config.geometric_high)


def _truncated_staleness(ratios: Ratios, config: LossConfig) -> torch.Tensor:
    return ratios.staleness.exp().clamp(max=config.ratio_cap)


def _sequence_ratio(ratios: Ratios, ids: torch.Tensor) -> torch.Tensor:
    return sequence_sums(ratios.total, ids).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _masked(weights: torch.Tensor, judged: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((judged >= low) & (judged <= high), weights, torch.zeros_like(weights))


_CORRECTIONS: dict[str, Correction] = {
    "none": _none,
    "token_tis": _token_tis,
    "sequence_tis": _sequence_tis,
    "icepop": _icepop,
    "sequence_mis": _sequence_mis,
    "geometric": _geometric,
}


Rejection = Callable[[torch.Tensor, torch.Tensor, LossConfig], torch.Tensor]
"""(log ratio [N], sequence_ids [N], config) -> bool [N]: tokens to keep."""
Gather = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(values per token [N], sequence_ids [N]) -> [N]: the value that decides about each token."""


def _each(values: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    return values


def _keep_all(log_ratio: torch.Tensor, _ids: torch.Tensor, _config: LossConfig) -> torch.Tensor:
    return torch.ones_like(log_ratio, dtype=torch.bool)


def _within_ratios(
    gather: Gather, log_ratio: torch.Tensor, ids: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """Low <= r <= high, which bounds k1 = -log r."""
    ratio = gather(log_ratio, ids).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    return (ratio >= config.rejection_low) & (ratio <= config.rejection_high)


def _within_k2(
    gather: Gather, log_ratio: torch.Tensor, ids: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    # k2 = (log r)^2 / 2.
    return gather(log_ratio.square() / 2, ids) <= config.rejection_nats_max


def _within_k3(
    gather: Gather, log_ratio: torch.Tensor, ids: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    # k3 = r - 1 - log r.
    return gather(log_ratio.exp() - 1 - log_ratio, ids) <= config.rejection_nats_max


_REJECTIONS: dict[str, Rejection] = {
    "none": _keep_all,
    "token_k1": partial(_within_ratios, _each),
    "token_k2": partial(_within_k2, _each),
    "token_k3": partial(_within_k3, _each),
    "sequence_sum_k1": partial(_within_ratios, sequence_sums),
    "sequence_sum_k2": partial(_within_k2, sequence_sums),
    "sequence_sum_k3": partial(_within_k3, sequence_sums),
    "sequence_mean_k1": partial(_within_ratios, sequence_means),
    "sequence_mean_k2": partial(_within_k2, sequence_means),
    "sequence_mean_k3": partial(_within_k3, sequence_means),
    "sequence_max_k2": partial(_within_k2, sequence_maxima),
    "sequence_max_k3": partial(_within_k3, sequence_maxima),
}


def correction_weights(
    ratios: Ratios, sequence_ids: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """Return the weight of each token under the configured correction and rejection, [N]."""
    weights = _CORRECTIONS[config.correction](ratios, sequence_ids, config)
    # Rejection after correction: a rejected token has weight 0 whatever its correction.
    is_kept = _REJECTIONS[config.rejection](ratios.total, sequence_ids, config)
    return torch.where(is_kept, weights, torch.zeros_like(weights))
