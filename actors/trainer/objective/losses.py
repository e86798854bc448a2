"""Policy losses: pure functions of tensors.

Every token of every rollout is divided by one constant (Dr. GRPO): neither long rollouts nor large
groups get another weight a token. To add a loss: a function here, a line in the table, and the name
in `config.LOSSES`.

Shapes: N sampled tokens, flat.
"""

from collections.abc import Callable

import torch

from penstock.actors.trainer.config import LossConfig
from penstock.actors.trainer.objective.corrections import LOG_RATIO_MAX

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
