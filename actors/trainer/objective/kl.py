"""Distance to a reference policy, and entropy: pure functions of tensors.

For a token that `policy` sampled, k1 = log(policy / reference) and k3 = reference / policy - 1 -
log(reference / policy) both have the mean KL(policy || reference); k3 is never negative and varies
less, and its gradient is a penalty, while k1 belongs in the reward (http://joschu.net/blog/kl-approx.html).
"""

from collections.abc import Sequence

import torch

from penstock.actors.trainer.objective.advantages import Estimator
from penstock.actors.trainer.objective.ratios import LOG_RATIO_MAX


def k1(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[N] and [N] logprobs -> [N] nats."""
    return (policy - reference).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def k3(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[N] and [N] logprobs -> [N] nats, at least 0; with a gradient."""
    log_ratio = -k1(policy, reference)
    return log_ratio.exp() - 1 - log_ratio


def reward_changes(
    rewards: Sequence[float], nats: Sequence[float], coefficient: float, estimate: Estimator
) -> list[float]:
    """Return the change of a group's advantages when k1 is subtracted from its rewards.

    Args:
        rewards: Reward of each rollout.
        nats: k1 of each rollout, summed over its tokens.
        coefficient: Reward per nat.
        estimate: Advantage estimator of the group.

    """
    if not rewards:
        return []
    # Through the estimator, because GRPO's advantages are not linear in the rewards.
    left = [reward - coefficient * value for reward, value in zip(rewards, nats, strict=True)]
    pairs = zip(estimate(rewards), estimate(left), strict=True)
    return [after - before for before, after in pairs]


_BLOCK_ELEMENTS = 1 << 18
"""Logits whose entropy is computed at once where no gradient keeps them: they fit a CPU's cache."""


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of each row's distribution in nats: [N, V] -> [N]; -inf is probability 0."""
    if logits.requires_grad or logits.is_cuda or logits.numel() <= _BLOCK_ELEMENTS:
        return _entropies(logits)
    # The rows' bits do not depend on the blocks; on a CPU, fresh memory for tables of all rows
    # takes longer than the entropies.
    blocks = logits.split(max(1, _BLOCK_ELEMENTS // logits.shape[1]))
    return torch.cat([_entropies(block) for block in blocks])


def _entropies(logits: torch.Tensor) -> torch.Tensor:
    log_chances = logits.float().log_softmax(-1)
    # A bound that a gradient's weight cannot carry to infinity, which times 0 would be NaN.
    terms = log_chances.exp() * log_chances.clamp(min=-1e9)
    return -terms.sum(-1)
