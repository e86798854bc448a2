"""A judge for rollouts played by external programs: it accepts the reward that they report."""

from penstock.actors.judge.config import REPORTED, JudgeConfig
from penstock.actors.judge.reward import Findings
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.reward import Outcome

SOLVED_FROM = 1.0 - 1e-6
"""Least reward that counts as solved: sums such as 0.7 + 0.2 + 0.1 fall just short of 1."""


class ReportedJudge:
    """Accepts `RolloutFinished.reported_reward`; a rollout without one is not trained."""

    name = REPORTED
    version = "1"

    def __init__(self, config: JudgeConfig) -> None:
        """Ignore the settings."""

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Return the outcome for the reported reward."""
        reward = rollout.finished.reported_reward
        if reward is None:
            detail = "the program that played it reported no reward"
            return Findings(outcome=Outcome.JUDGE_ERROR, detail=detail)
        if reward >= SOLVED_FROM:
            return Findings(outcome=Outcome.SOLVED, num_tests=1, num_tests_passed=1)
        score = reward if reward > 0 else None
        return Findings(outcome=Outcome.FAILED, score=score, num_tests=1)
