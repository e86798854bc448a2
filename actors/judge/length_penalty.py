"""The nonlinear length penalty: short episodes are told apart, long ones are not ruined.

C(x) = ((1 + k x)^(1-q) - 1) / (k (1-q)), where x is a weighted sum of tokens, calls and turns.
C'(0) = 1; q -> 1 gives ln(1 + k x) / k; q = 0 or k -> 0 gives x.

Source: the technical report of Composer 2 (its k, q and weights are not public: settings here).
"""

import math

import msgspec

from penstock.messages.rollout import RolloutFinished
from penstock.messages.settings import NonNegativeFloat

_NEAR_ONE = 1e-9


class LengthPenaltyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights and form of the penalty; defaults keep it well below the value of a solved task."""

    scale: NonNegativeFloat = 0.02
    """Reward lost for each unit of C; 0 turns the penalty off."""
    penalty_max: NonNegativeFloat = 0.2
    """Bound of the whole penalty."""
    k: NonNegativeFloat = 0.5
    q: NonNegativeFloat = 1.0
    sampled_token: NonNegativeFloat = 0.002
    """Weight of one token that the policy drew; thinking, calls and answer alike."""
    observed_token: NonNegativeFloat = 0.0005
    """Weight of one token that a tool returned."""
    call: NonNegativeFloat = 0.1
    turn: NonNegativeFloat = 0.1


def penalty_curve(x: float, k: float, q: float) -> float:
    """Return C(x) for x >= 0, k >= 0, q >= 0."""
    if k * x < _NEAR_ONE:
        return x
    log_growth = math.log1p(k * x)
    exponent = 1.0 - q
    if abs(exponent) < _NEAR_ONE:
        return log_growth / k
    return math.expm1(exponent * log_growth) / (k * exponent)


def effort(rollout: RolloutFinished, config: LengthPenaltyConfig) -> float:
    """Return x: the weighted sum over the episode. The prompt costs nothing."""
    num_observed = sum(turn.context_ids.shape[0] for turn in rollout.turns[1:])
    return (
        config.sampled_token * rollout.num_sampled_tokens
        + config.observed_token * num_observed
        + config.call * rollout.num_calls
        + config.turn * len(rollout.turns)
    )


def length_penalty(rollout: RolloutFinished, config: LengthPenaltyConfig) -> float:
    """Return the penalty, 0 <= penalty <= `penalty_max`; the reward loses it."""
    cost = penalty_curve(effort(rollout, config), config.k, config.q)
    return min(config.penalty_max, config.scale * cost)
