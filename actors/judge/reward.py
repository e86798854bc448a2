"""From findings to a reward: components that sum to it. Pure.

The length penalty distinguishes short episodes and does not ruin long ones:
C(x) = ((1 + k x)^(1-q) - 1) / (k (1-q)), where x is a weighted sum of tokens, calls and turns.
C'(0) = 1; q -> 1 gives ln(1 + k x) / k; q = 0 or k -> 0 gives x.

Source: the technical report of Composer 2 (its k, q and weights are not public: settings here).
"""

import math

import msgspec

from penstock.actors.judge.config import JudgeConfig, LengthPenaltyConfig
from penstock.messages.reward import CheatFinding, Outcome
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, SandboxRecord

_ENDS = {
    EpisodeEnd.POLICY_ERROR: Outcome.POLICY_ERROR,
    EpisodeEnd.TIME_LIMIT: Outcome.TIMEOUT,
    EpisodeEnd.INFRASTRUCTURE_ERROR: Outcome.INFRASTRUCTURE_ERROR,
    EpisodeEnd.CANCELLED: Outcome.CANCELLED,
}


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge found out about one rollout."""

    outcome: Outcome
    num_tests_passed: int = 0
    num_tests: int = 0
    sandbox: SandboxRecord | None = None
    detail: str = ""
    cheats: list[CheatFinding] = []
    unseparated: bool = False


def outcome_of_end(end: EpisodeEnd) -> Outcome | None:
    """Return the outcome that the end of an episode settles by itself, or None.

    An episode that met its turn or token limit is graded like a finished one: what it did to the
    files by then is what it did.
    """
    return _ENDS.get(end)


def reward_components(
    rollout: RolloutFinished, outcome: Outcome, config: JudgeConfig
) -> dict[str, float]:
    """Return the parts of the reward; empty where the outcome is masked.

    Only what solves the task is charged for its length: among failures a penalty would teach to
    give up early.
    """
    if outcome.is_masked:
        return {}
    if outcome in {Outcome.POLICY_ERROR, Outcome.TIMEOUT}:
        return {"policy_fault": config.reward_min}
    if outcome is not Outcome.SOLVED:
        return {"tests": config.reward_failed}
    penalty = length_penalty(rollout, config.length_penalty)
    return {"tests": config.reward_solved, "length_penalty": -penalty}


_NEAR_ONE = 1e-9


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
    num_observed = sum(turn.num_context for turn in rollout.turns[1:])
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
