"""Advantage estimators: from the rewards of a group to one advantage per rollout.

Rewards belong to unmasked rollouts only, in member order. The arithmetic is Python's float64 in
that order, so that replay gets the same bits. To add an estimator, add a function here, a line to
the table, and the name to `config.ESTIMATORS`.
"""

from collections.abc import Callable, Mapping, Sequence

from penstock.messages.rollout import Trunk
from penstock.messages.training import TrunkCredit

Estimator = Callable[[Sequence[float]], list[float]]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, not divided by its deviation (arXiv 2503.20783, section 3)."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo(rewards: Sequence[float]) -> list[float]:
    """Reward minus mean, over the group's deviation (arXiv 2402.03300, section 4.1).

    The deviation is the sample's, over n - 1, as in verl and TRL: the paper does not say which.
    """
    centered = dr_grpo(rewards)
    deviation = (sum(value * value for value in centered) / max(1, len(centered) - 1)) ** 0.5
    # 1e-6, so that equal rewards give 0 and not NaN.
    return [value / (deviation + 1e-6) for value in centered]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of the others (arXiv 2402.14740); 0 for a single rollout."""
    if len(rewards) == 1:
        return [0.0]
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def trunk_advantage(branches: Sequence[float]) -> float:
    """Return the advantage of tokens that several rollouts share: the mean over its branches.

    A shared token is trained once. Its mean equals tree-wise GRPO, where the token is in every
    branch's sequence with weight 1/k. In a group with a single tree the mean is 0.

    Source: Tree-GRPO (arXiv 2509.21240), section 3: leaves are compared within and across trees.
    """
    return sum(branches) / len(branches)


def trunk_credits(
    advantages: Mapping[str, float],
    trunks: Mapping[str, Trunk],
    num_tokens: Callable[[Trunk], int],
) -> dict[str, TrunkCredit]:
    """Return the credit of the shared first tokens, by trunk rollout.

    Args:
        advantages: Advantage of each trained rollout, in member order.
        trunks: Trunk of each branch.
        num_tokens: Function that counts the sampled tokens of a trunk's turns.

    """
    sharing: dict[Trunk, list[str]] = {}
    for name in advantages:
        trunk = trunks.get(name)
        if trunk and trunk.rollout_id in advantages:
            sharing.setdefault(trunk, [trunk.rollout_id]).append(name)
    return {
        trunk.rollout_id: TrunkCredit(
            num_tokens=num_tokens(trunk),
            branches=names,
            advantage=trunk_advantage([advantages[name] for name in names]),
        )
        for trunk, names in sharing.items()
    }


_ESTIMATORS: dict[str, Estimator] = {"dr_grpo": dr_grpo, "grpo": grpo, "rloo": rloo}


def estimator(name: str) -> Estimator:
    """Return the estimator of a name that `TrainerConfig` accepted."""
    return _ESTIMATORS[name]
