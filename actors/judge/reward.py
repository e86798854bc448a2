"""Turns findings into reward components, whose sum is the reward. Pure.

The length penalty separates short episodes and saturates for long ones:
C(x) = ((1 + k x)^(1-q) - 1) / (k (1-q)), where x is a weighted sum of thinking, call, output and
final tokens, of calls and of turns. C'(0) = 1; q -> 1 gives ln(1 + k x) / k; q = 0 or k -> 0
gives x.

Source: the technical report of Composer 2. Its k, q and weights are not public; here they are
settings.
"""

import math
from collections.abc import Sequence

import msgspec

from penstock.actors.judge.config import JudgeConfig, LengthPenaltyConfig
from penstock.messages.reward import (
    LENGTH_PENALTY,
    CheatFinding,
    JudgeScore,
    Lengths,
    Outcome,
    Verdict,
)
from penstock.messages.rollout import EpisodeEnd, SandboxRecord

_ENDS = {
    EpisodeEnd.POLICY_ERROR: Outcome.POLICY_ERROR,
    EpisodeEnd.TIME_LIMIT: Outcome.TIMEOUT,
    EpisodeEnd.INFRASTRUCTURE_ERROR: Outcome.INFRASTRUCTURE_ERROR,
    EpisodeEnd.CANCELLED: Outcome.CANCELLED,
}


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the judges for one rollout; fields as in `Verdict`."""

    outcome: Outcome
    score: float | None = None
    """Fractional reward of the verifier, in (0, 1)."""
    scores: list[JudgeScore] = []
    lengths: Lengths | None = None
    num_tests_passed: int = 0
    num_tests: int = 0
    sandbox: SandboxRecord | None = None
    detail: str = ""
    cheats: list[CheatFinding] = []
    unseparated: bool = False


def outcome_of_end(end: EpisodeEnd) -> Outcome | None:
    """Return the outcome that follows from how an episode ended, or None if it has to be graded.

    An episode that reached its turn or token limit is graded like a finished one.
    """
    return _ENDS.get(end)


def is_scored(outcome: Outcome, config: JudgeConfig) -> bool:
    """Return whether additional judges and auxiliary scores count for an outcome of the tests."""
    return outcome is Outcome.SOLVED or (outcome is Outcome.FAILED and config.scores_failed)


def reward_components(findings: Findings, config: JudgeConfig) -> dict[str, float]:
    """Return the parts of the reward by name; empty if the outcome is masked.

    The tests decide and other judges add: a failed rollout always stays below every solved one
    (`JudgeConfig` checks the weights), and the policy's own faults earn no bonus.
    """
    outcome = findings.outcome
    if outcome.is_masked:
        return {}
    if outcome in {Outcome.POLICY_ERROR, Outcome.TIMEOUT}:
        return {"policy_fault": config.reward_min}
    if outcome is Outcome.SOLVED:
        # Only solved rollouts pay for length: among failures it would teach to give up early.
        penalty = length_penalty(findings.lengths or Lengths(), config.length_penalty)
        parts = {"tests": config.reward_solved, LENGTH_PENALTY: -penalty}
    else:
        parts = {"tests": config.reward_failed}
        if findings.score:
            parts["partial"] = config.partial_credit * findings.score
    return parts | (_bonus(findings.scores, config) if is_scored(outcome, config) else {})


def _bonus(scores: Sequence[JudgeScore], config: JudgeConfig) -> dict[str, float]:
    """Return each judge's weight times the weighted mean of its criteria.

    A judge that could not score one of its criteria adds nothing.
    """
    found = {(one.judge, one.criterion): one.score for one in scores}
    parts: dict[str, float] = {}
    for name, weight in config.auxiliary.weights.items():
        if (score := found.get((name, ""))) is not None:
            parts[f"auxiliary.{name}"] = weight * score
    for judge in config.judges:
        values = [found.get((judge.name, one.name)) for one in judge.criteria]
        weights = [one.weight for one in judge.criteria]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            mean = sum(w * v for w, v in zip(weights, known, strict=True)) / sum(weights)
            parts[f"judge.{judge.name}"] = judge.weight * mean
    return parts


def recompose(verdict: Verdict, config: JudgeConfig) -> dict[str, float]:
    """Return the components of a recorded verdict under other settings."""
    findings = Findings(
        outcome=verdict.outcome,
        score=verdict.score,
        scores=verdict.scores,
        lengths=verdict.lengths,
    )
    return reward_components(findings, config)


_NEAR_ONE = 1e-9  # Below it, the limits q -> 1 and k x -> 0 are exact to double precision.


def penalty_curve(x: float, k: float, q: float) -> float:
    """Return C(x) for x >= 0, k >= 0, q >= 0."""
    if k * x < _NEAR_ONE:
        return x
    log_growth = math.log1p(k * x)
    exponent = 1.0 - q
    if abs(exponent) < _NEAR_ONE:
        return log_growth / k
    return math.expm1(exponent * log_growth) / (k * exponent)


def effort(lengths: Lengths, config: LengthPenaltyConfig) -> float:
    """Return x, the weighted sum of an episode's lengths."""
    # By differences to the final message's weight, so that equal weights give the same bits as one
    # weight for all kinds.
    num_sampled = lengths.thinking + lengths.call + lengths.final
    return (
        config.final_token * num_sampled
        + (config.thinking_token - config.final_token) * lengths.thinking
        + (config.call_token - config.final_token) * lengths.call
        + config.output_token * lengths.output
        + config.call * lengths.num_calls
        + config.turn * lengths.num_turns
    )


def length_penalty(lengths: Lengths, config: LengthPenaltyConfig) -> float:
    """Return the penalty, 0 <= penalty <= `penalty_max`, which is subtracted from the reward."""
    x = max(0.0, effort(lengths, config))
    cost = penalty_curve(x, config.k, config.q)
    return min(config.penalty_max, config.scale * cost)
