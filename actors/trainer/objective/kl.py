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


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of each row's distribution in nats: [N, V] -> [N]; -inf is probability 0."""
    logprobs = logits.float().log_softmax(-1)
    # Clamped, because 0 * -inf is NaN.
    terms = logprobs.exp() * logprobs.clamp(min=torch.finfo(torch.float32).min)
    return -terms.sum(-1)
