"""From findings to a reward: components that sum to it. Pure."""

import msgspec

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.length_penalty import length_penalty
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
