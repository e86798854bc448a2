"""`penstock judge calibrate`: a judge beside people, on the same work."""

from collections.abc import Mapping, Sequence

from penstock.actors.judge.rubric.judge import RubricJudge
from penstock.infra.judge.agreement import Judgment, measure
from penstock.infra.judge.asking import JudgeSilentError, score_all
from penstock.infra.judge.calibration import Calibration
from penstock.infra.judge.labels import HumanLabel, by_criterion, nearest_choice
from penstock.messages.reward import JudgeScore


async def calibrate(judge: RubricJudge, labels: Sequence[HumanLabel]) -> Calibration:
    """Ask a judge about labelled work, and compare.

    Raises:
        JudgeSilentError: It scored nothing of a criterion.

    """
    submissions = [label.submission(number) for number, label in enumerate(labels)]
    asked = await score_all(judge, submissions)
    scores = {(n, one.criterion): one for n, each in enumerate(asked) for one in each}
    criteria = {one.name: one for one in judge.config.criteria}
    found = {
        name: measure(_judgments(numbered, scores, criteria[name].choices), criteria[name].choices)
        for name, numbered in by_criterion(labels)
    }
    everything = list(scores.values())
    answered_by = {one.version.partition("/")[2] for one in everything if one.score is not None}
    return Calibration(
        judge=judge.config.name,
        digest=judge.digest,
        answered_by=sorted(answered_by - {""}),
        criteria=found,
        num_failed=sum(scores[n, one.criterion].score is None for n, one in enumerate(labels)),
        num_prompt_tokens=sum(one.num_prompt_tokens for one in everything),
        num_reply_tokens=sum(one.num_reply_tokens for one in everything),
    )


def _judgments(
    numbered: Sequence[tuple[int, HumanLabel]],
    scores: Mapping[tuple[int, str], JudgeScore],
    choices: Mapping[str, float],
) -> list[Judgment]:
    judgments: list[Judgment] = []
    cause = ""
    for number, label in numbered:
        found = scores[number, label.criterion]
        if (score := found.score) is None:
            cause = found.detail
            continue
        choice = nearest_choice(score, choices)
        judgments.append(Judgment(human=label.choice, judge=choice, score=score))
    if not judgments:
        raise JudgeSilentError(f"criterion {numbered[0][1].criterion}: no score: {cause}")
    return judgments
