"""Policy losses: pure functions of tensors.

Three policies are involved: the one that sampled (behavior), the one at the start of the step
(proximal), and the one that is trained (current). In the first pass over a batch, the last two are
equal. Corrections (`corrections.py`) are weights. All tokens are divided by one constant (Dr.
GRPO), so that neither the length of a rollout nor the size of its group changes a token's weight.

To add a loss, add a function here and a line to `registry.LOSSES`.
"""

from dataclasses import dataclass

import torch

from penstock.actors.trainer.config import LossConfig
from penstock.actors.trainer.objective.ratios import (
    LOG_RATIO_MAX,
    log_ratios,
    sequence_lengths,
    sequence_means,
)
from penstock.actors.trainer.objective.registry import LOSSES, LossSpec
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import load_reference


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """Inputs of a loss: N sampled tokens of some sequences, flat."""

    current: torch.Tensor
    """[N] logprobs, with a gradient."""
    proximal: torch.Tensor
    """[N] logprobs."""
    behavior: torch.Tensor
    """[N] logprobs."""
    advantages: torch.Tensor
    """[N]."""
    weights: torch.Tensor
    """[N] weights of the correction; 0 masks a token."""
    sequence_ids: torch.Tensor
    """[N] int64, ascending."""


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """Losses of N tokens, before normalization."""

    values: torch.Tensor
    """[N]."""
    is_clipped: torch.Tensor
    """bool [N]: tokens for which the loss's own bound took effect."""


def policy_gradient(tokens: LossTokens, _config: LossConfig) -> TokenLosses:
    """-w_t A log pi: its gradient is REINFORCE's, corrected by w_t."""
    values = -tokens.weights * tokens.advantages * tokens.current
    return TokenLosses(values=values, is_clipped=torch.zeros_like(values, dtype=torch.bool))


def ppo_clip(tokens: LossTokens, config: LossConfig) -> TokenLosses:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r against the behavior policy (arXiv 1707.06347)."""
    return _clipped(_ratio(tokens.current, tokens.behavior), tokens, config, config.dual_clip)


def decoupled_ppo(tokens: LossTokens, config: LossConfig) -> TokenLosses:
    """w_t times PPO's clip with r against the proximal policy, w_t correcting proximal to behavior.

    Source: Hilton et al. (arXiv 2110.00641), AReaL (arXiv 2505.24298), equation 5.
    """
    return _clipped(_ratio(tokens.current, tokens.proximal), tokens, config, config.dual_clip)


def cispo(tokens: LossTokens, config: LossConfig) -> TokenLosses:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: no token loses its gradient (arXiv 2506.13585)."""
    ratio = _ratio(tokens.current, tokens.behavior).detach()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    values = -tokens.weights * clipped * tokens.advantages * tokens.current
    return TokenLosses(values=values, is_clipped=ratio != clipped)


def gspo(tokens: LossTokens, config: LossConfig) -> TokenLosses:
    """PPO's clip with one ratio per sequence, the geometric mean over tokens (arXiv 2507.18071).

    Each sequence has the same weight, whatever its length.
    """
    ids, current = tokens.sequence_ids, tokens.current
    mean = sequence_means((current - tokens.behavior).detach(), ids)
    # The value of the sequence's mean, with the gradient of the single token (GSPO-token).
    log_ratio = (current - current.detach() + mean).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    losses = _clipped(log_ratio.exp(), tokens, config)
    # Cancels the step's divisor, which is per token.
    per_token = config.token_denominator / sequence_lengths(current.detach(), ids)
    return TokenLosses(values=losses.values * per_token, is_clipped=losses.is_clipped)


def _ratio(current: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return (current - before).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _clipped(
    ratio: torch.Tensor, tokens: LossTokens, config: LossConfig, dual_clip: float = 0.0
) -> TokenLosses:
    advantages = tokens.advantages
    gain = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    objective = torch.minimum(gain, clipped)
    is_clipped = clipped < gain
    if dual_clip:  # Bounds the loss of a token with a negative advantage (arXiv 1912.09729).
        least = dual_clip * advantages
        is_bounded = (advantages < 0) & (objective < least)
        objective = torch.where(is_bounded, least, objective)
        is_clipped = is_clipped | is_bounded
    return TokenLosses(values=-tokens.weights * objective, is_clipped=is_clipped.detach())


def loss_spec(config: LossConfig) -> LossSpec:
    """Return the configured loss, built-in or custom.

    Raises:
        ConfigError: The custom loss does not exist or is not a loss, or its correction would weight
            tokens twice.

    """
    if config.name in LOSSES:
        return LOSSES[config.name]
    own = load_reference(config.name, "trainer.loss.name")
    if isinstance(own, LossSpec):
        own.check_correction(config.name, config.correction)
        return own
    if not callable(own):
        text = f"expected a penstock.LossSpec or a function, got {type(own).__name__}"
        raise ConfigError(f"trainer.loss.name: {config.name!r}: {text}")
    if config.correction != "none":
        raise ConfigError(
            f"trainer.loss.correction: expected none, since {config.name} does not declare the "
            f"ratio that it takes, got {config.correction!r}; name a penstock.LossSpec, with "
            "ratio_against=None for a loss that only multiplies by LossTokens.weights"
        )
    # A plain function does not declare its ratio. Assume that it corrects itself: replay shows the
    # bias of a missing correction, while a doubled one would go unnoticed.
    return LossSpec(own, ratio_against="behavior")


def corrected_ratios(
    current: torch.Tensor, proximal: torch.Tensor, behavior: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """Return the log ratios [N] that correct a loss, clamped and without gradient."""
    # A loss with a ratio against the proximal policy leaves only proximal / behavior to correct.
    is_decoupled = loss_spec(config).ratio_against == "proximal"
    return log_ratios(proximal if is_decoupled else current, behavior)


def token_losses(tokens: LossTokens, config: LossConfig) -> TokenLosses:
    """Return the configured loss of each token, before normalization.

    Raises:
        ConfigError: As `loss_spec`, or a custom loss did not return `TokenLosses` [N].

    """
    losses = loss_spec(config).function(tokens, config)
    shape = tokens.current.shape
    if not isinstance(losses, TokenLosses) or losses.values.shape != shape:
        text = f"expected TokenLosses of {tuple(shape)} values"
        raise ConfigError(f"trainer.loss.name: {config.name!r}: {text}")
    return losses


def normalizer(num_rollouts: int, config: LossConfig) -> float:
    """Return the divisor of a step's summed token losses."""
    return max(num_rollouts, 1) * config.token_denominator
