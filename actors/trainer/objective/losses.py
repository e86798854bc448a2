"""Policy losses: pure functions of tensors.

Three policies have a say: the one that sampled (behavior), the one at the start of the step
(proximal), and the one that is trained (current); in the first pass over a batch the last two are
equal. Corrections (`corrections.py`) are weights. Every token of every rollout is divided by one
constant (Dr. GRPO): neither long rollouts nor large groups get another weight per token.

To add one: a function here, and its line in `registry.LOSSES`.
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
    """What a loss knows of N sampled tokens of some sequences, flat."""

    current: torch.Tensor
    """[N] logprobs, with a gradient."""
    proximal: torch.Tensor
    """[N] logprobs."""
    behavior: torch.Tensor
    """[N] logprobs."""
    advantages: torch.Tensor
    """[N]."""
    weights: torch.Tensor
    """[N] of the correction; 0 masks a token."""
    sequence_ids: torch.Tensor
    """[N] int64, ascending."""


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """Of N tokens, before normalization."""

    values: torch.Tensor
    """[N]."""
    is_clipped: torch.Tensor
    """bool [N]: where the loss's own bound took effect."""


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
    """PPO's clip with one ratio for a sequence, its tokens' geometric mean (arXiv 2507.18071).

    A sequence counts once, whatever its length: the step's divisor stands for that length.
    """
    ids, current = tokens.sequence_ids, tokens.current
    mean = sequence_means((current - tokens.behavior).detach(), ids)
    log_ratio = (current - current.detach() + mean).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    losses = _clipped(log_ratio.exp(), tokens, config)
    per_token = config.token_denominator / sequence_lengths(current.detach(), ids)
    return TokenLosses(values=losses.values * per_token, is_clipped=losses.is_clipped)


def _ratio(current: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return (current - before).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _clipped(
    ratio: torch.Tensor, tokens: LossTokens, config: LossConfig, dual_clip: float = 0.0
) -> TokenLosses:
    """Bound what a ratio [N] may gain, and with dual clip what it may lose."""
    advantages = tokens.advantages
    gain = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    objective = torch.minimum(gain, clipped)
    is_clipped = clipped < gain
    if dual_clip:
        least = dual_clip * advantages
        is_bounded = (advantages < 0) & (objective < least)
        objective = torch.where(is_bounded, least, objective)
        is_clipped = is_clipped | is_bounded
    return TokenLosses(values=-tokens.weights * objective, is_clipped=is_clipped.detach())


def loss_spec(config: LossConfig) -> LossSpec:
    """Return the configured loss, own code or not.

    Own code that is a mere function says nothing of its ratio, so that it is taken to correct
    itself: too weak a correction is a bias that replay shows, one applied twice goes unnoticed.

    Raises:
        ConfigError: The settings name own code that is not there or is no loss, or a correction
            that it must not have.

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
    return LossSpec(own, ratio_against="behavior")


def corrected_ratios(
    current: torch.Tensor, proximal: torch.Tensor, behavior: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """Return the log ratios [N] that a loss is to be corrected by, clamped and without gradient.

    A loss with a ratio against the proximal policy leaves only that policy to correct; the others
    have the current policy's ratio, which is another one from the second pass on.
    """
    is_decoupled = loss_spec(config).ratio_against == "proximal"
    return log_ratios(proximal if is_decoupled else current, behavior)


def token_losses(tokens: LossTokens, config: LossConfig) -> TokenLosses:
    """Return the configured loss of each token, before normalization.

    Raises:
        ConfigError: As `loss_spec` does; or own code returned no `TokenLosses` [N].

    """
    losses = loss_spec(config).function(tokens, config)
    shape = tokens.current.shape
    if not isinstance(losses, TokenLosses) or losses.values.shape != shape:
        text = f"expected TokenLosses of {tuple(shape)} values"
        raise ConfigError(f"trainer.loss.name: {config.name!r}: {text}")
    return losses


def normalizer(num_rollouts: int, config: LossConfig) -> float:
    """Return the constant that a step's summed token losses are divided by."""
    return max(num_rollouts, 1) * config.token_denominator
