"""The judges beside the verifiable one: asked about what was graded, never about its outcome.

```
 Findings(outcome) ── solved, or failed with `judge.scores_failed` ──▶ auxiliary, rubric judges
                                                                            │ scores
        a judge that failed: masked (`on_failure = "mask"`), or no score ◀──┘
```
"""

import asyncio
from collections.abc import Sequence

import msgspec

from penstock.actors.judge.auxiliary import auxiliary_scores
from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.reward import Findings, is_scored
from penstock.actors.judge.rubric.config import MASK, RubricConfig
from penstock.actors.judge.rubric.endpoint import Endpoint
from penstock.actors.judge.rubric.generators import Generators
from penstock.actors.judge.rubric.judge import Answerer, RubricJudge
from penstock.actors.judge.submission import read_submission
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.reward import JudgeScore, Outcome
from penstock.messages.task import Purpose


class Panel:
    """All judges of a run but the verifiable one.

    Raises:
        ConfigError: A judge's key is not where the settings say.

    """

    def __init__(
        self, config: JudgeConfig, chat: ChatFormat, replicas: ReplicaTable, ctx: Context
    ) -> None:
        self._config = config
        self._chat = chat
        self._judges = [
            RubricJudge(one, _answerer(one, chat, replicas, ctx), ctx) for one in config.judges
        ]

    async def add(self, findings: Findings, rollout: Trajectory, task: GradedTask) -> Findings:
        """Return the findings with what the others say of a training rollout."""
        has_scorers = self._judges or self._config.auxiliary.weights
        is_trained = rollout.finished.purpose is Purpose.TRAIN
        if not (has_scorers and is_trained and is_scored(findings.outcome, self._config)):
            return findings
        submission = read_submission(rollout, task, self._chat)
        scores = auxiliary_scores(submission, self._config.auxiliary)
        asked = await asyncio.gather(*(judge.score(submission) for judge in self._judges))
        scores += [score for each in asked for score in each]
        findings = msgspec.structs.replace(findings, scores=scores)
        failed = [
            one
            for judge, each in zip(self._judges, asked, strict=True)
            if judge.config.on_failure == MASK
            for one in each
            if one.score is None
        ]
        return _masked(findings, failed) if failed else findings


def _masked(findings: Findings, failed: Sequence[JudgeScore]) -> Findings:
    detail = "; ".join(f"judge {one.judge}, {one.criterion}: {one.detail}" for one in failed)
    return msgspec.structs.replace(findings, outcome=Outcome.JUDGE_ERROR, detail=detail)


def _answerer(
    config: RubricConfig, chat: ChatFormat, replicas: ReplicaTable, ctx: Context
) -> Answerer:
    if config.endpoint is not None:
        return Endpoint(config.endpoint)
    assert config.policy_version is not None, "the settings have one of both"
    return Generators(config.policy_version, chat, replicas, ctx)
