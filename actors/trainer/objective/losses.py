"""Off-policy corrections and policy losses: pure functions of tensors.

A correction says how much each sampled token counts, by its ratio to the sampler, r_t = proximal /
behavior probability of token t. One optimizer step is taken on a batch, so the proximal policy is
the current one before the step. A loss uses those weights. Every token of every rollout is divided
by one constant (Dr. GRPO): neither long rollouts nor large groups get another weight per token.

To add one: a function here, a line in its table, and the name in `config.CORRECTIONS` or
`config.LOSSES`.

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


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, LossConfig], torch.Tensor]
"""(current logprobs [N], behavior logprobs [N], advantages [N], weights [N], config) -> [N]."""


def _policy_gradient(
    current: torch.Tensor,
    _behavior: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    _config: LossConfig,
) -> torch.Tensor:
    """-w_t A log pi: its gradient is REINFORCE's, corrected by w_t."""
    return -weights * advantages * current


def _ppo_clip(
    current: torch.Tensor,
    behavior: torch.Tensor,
    advantages: torch.Tensor,
    _weights: torch.Tensor,
    config: LossConfig,
) -> torch.Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r against the behavior policy (arXiv 1707.06347)."""
    ratio = (current - behavior).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


_LOSSES: dict[str, Loss] = {"policy_gradient": _policy_gradient, "ppo_clip": _ppo_clip}


def token_losses(
    current: torch.Tensor,
    behavior: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    config: LossConfig,
) -> torch.Tensor:
    """Return the configured loss of each token, [N], before normalization."""
    return _LOSSES[config.name](current, behavior, advantages, weights, config)


def normalizer(num_rollouts: int, config: LossConfig) -> float:
    """Return the constant that a step's summed token losses are divided by."""
    return max(num_rollouts, 1) * config.token_denominator
