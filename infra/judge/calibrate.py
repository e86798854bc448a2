"""`penstock judge calibrate`: compares a judge with people on the same work.

Labels come from a file of JSON lines or from a run's log.

    {"criterion": "clear", "choice": "yes", "task": "...", "diff": "...", "final": "..."}

The `choice` of a line is one of the criterion's choices, word for word. Labels of episodes in a log
(`penstock label`) become the choice with the nearest score. Labels of served replies become the
best or worst choice, with the context as the task and the reply as the final message.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.actors.judge.rubric.config import CriterionConfig, RubricConfig
from penstock.actors.judge.rubric.judge import RubricJudge
from penstock.actors.judge.submission import Submission, read_submission
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.envs.tasks.set_ups import recorded_set_ups
from penstock.envs.tasks.storage import GradedTask, load_tasks
from penstock.infra.config.file import load_config
from penstock.infra.corpora.lines import read_lines
from penstock.infra.export.preferences import PreferenceReader, standing
from penstock.infra.judge.agreement import Judgment, measure
from penstock.infra.judge.asking import JudgeSilentError, score_all
from penstock.infra.judge.calibration import Calibration
from penstock.infra.run.runs import RunDir, open_log, open_vault
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.trajectories import last_of, read_trajectory
from penstock.messages.reward import JudgeScore
from penstock.messages.rollout import RolloutFinished
from penstock.messages.signals.episode_labels import EpisodeLabeled, EpisodeLabels
from penstock.messages.signals.preferences import Label
from penstock.messages.task import HiddenTests, Split

LABELS_MAX = 100_000


class HumanLabel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person's choice for a piece of work; one line of a file."""

    criterion: str
    choice: str
    task: str = ""
    diff: str = ""
    final: str = ""
    turns: str = ""

    def submission(self, number: int) -> Submission:
        """Return the labeled work."""
        return Submission(
            sample_id=f"label-{number}",
            task=self.task,
            diff=self.diff,
            final=self.final,
            turns=self.turns,
        )


def read_labels(path: Path, judge: RubricConfig) -> list[HumanLabel]:
    """Return the labels of a file for a judge's criteria.

    Raises:
        ConfigError: A line is malformed, its choice is not one of the criterion's, or there are no
            labels.

    """
    criteria = {one.name: one for one in judge.criteria}
    found: list[HumanLabel] = []
    for place, label in read_lines(path, HumanLabel, "--labels"):
        criterion = criteria.get(label.criterion)
        if criterion is None:
            continue
        if label.choice not in criterion.choices:
            choices = ", ".join(map(repr, criterion.choices))
            text = f"expected one of {choices}, got {label.choice!r}"
            raise ConfigError(f"--labels: {place}: choice: {text}")
        # An empty submission is scored without asking the judge.
        if not (label.diff or label.final):
            raise ConfigError(f"--labels: {place}: expected a diff or a final message")
        found.append(label)
        # Each label costs calls of the judge for every criterion.
        if len(found) > LABELS_MAX:
            raise ConfigError(f"--labels: {path}: expected at most {LABELS_MAX} labels")
    if not found:
        names = ", ".join(criteria)
        raise ConfigError(f"--labels: {path}: expected labels of the criteria {names}, found none")
    return found


async def logged_labels(run: RunDir, criterion: CriterionConfig) -> list[HumanLabel]:
    """Return the labels of a run's episodes and replies, as labels of one criterion.

    Raises:
        ConfigError: The log has no readable label.

    """
    async with open_log(run, "judge") as bus:
        store = run.store()
        text = (await store.get(TOKENIZER_KEY)).decode()
        tokenizer = Tokenizer.from_json(text, TOKENIZER_KEY)
        reader = PreferenceReader(store, open_vault(run), last_of(bus), tokenizer, chat=None)
        chat = open_chat(load_config(run.config).model.chat, tokenizer)
        found = await episode_labels(bus, store, chat, criterion)
        found += await standing_labels(bus, reader, criterion)
    if not found:
        raise ConfigError(f"--run: {run.run_id}: its log has no label that can be read")
    return found


async def standing_labels(
    bus: Bus, reader: PreferenceReader, criterion: CriterionConfig
) -> list[HumanLabel]:
    """Return the valid, readable labels of a log's served replies."""
    scores = criterion.choices
    best, worst = max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)
    found: list[HumanLabel] = []
    labels = [one for one in await standing(bus) if isinstance(one, Label)]
    for label in labels[:LABELS_MAX]:
        line = await reader.line(label)
        if line is not None:
            found.append(
                HumanLabel(
                    criterion=criterion.name,
                    choice=best if label.is_desirable else worst,
                    task=line["prompt"],
                    final=line["completion"],
                )
            )
    return found


async def episode_labels(
    bus: Bus, store: ObjectStore, chat: ChatFormat, criterion: CriterionConfig
) -> list[HumanLabel]:
    """Return the valid, readable labels of a log's episodes."""
    labels = EpisodeLabels()
    async for delivery in bus.follow([EpisodeLabeled], stop_at_end=True):
        assert isinstance(delivery.event, EpisodeLabeled)
        labels.add(delivery.event)
    last = last_of(bus)
    # Both splits: people also label episodes of evaluations.
    tasks = {task.task_id: task for split in Split for task in await load_tasks(store, split)}
    found: list[HumanLabel] = []
    for rollout_id in labels.rollout_ids[:LABELS_MAX]:
        finished = await last(RolloutFinished, rollout_id)
        if finished is None or (task := tasks.get(finished.task_id)) is None:
            continue
        try:
            trajectory = await read_trajectory(store, last, finished)
            made = await recorded_set_ups(store, last, task)
        except CodecError:  # A payload was collected.
            continue
        # Rubric judges do not see hidden tests, which are not read here.
        none = HiddenTests(task_id=task.task_id, files={}, argv=[])
        hidden = msgspec.structs.replace(none, steps=[none] * len(task.steps))
        graded = GradedTask(task=task, hidden=hidden, made=made)
        done = read_submission(trajectory, graded, chat)
        work = {"task": done.task, "diff": done.diff, "final": done.final, "turns": done.turns}
        for label in labels.of(rollout_id):
            choice = nearest_choice(label.value or 0.0, criterion.choices)
            found.append(HumanLabel(criterion=criterion.name, choice=choice, **work))
    return found[:LABELS_MAX]


def nearest_choice(score: float, choices: Mapping[str, float]) -> str:
    """Return the first choice with the nearest score."""
    return min(choices, key=lambda one: abs(choices[one] - score))


def by_criterion(
    labels: Sequence[HumanLabel],
) -> Iterator[tuple[str, list[tuple[int, HumanLabel]]]]:
    """Yield each criterion with its labels, numbered over all."""
    for name in dict.fromkeys(label.criterion for label in labels):
        yield name, [(n, one) for n, one in enumerate(labels) if one.criterion == name]


async def calibrate(judge: RubricJudge, labels: Sequence[HumanLabel]) -> Calibration:
    """Ask a judge about labeled work and compare.

    Raises:
        JudgeSilentError: The judge gave no score on a criterion.

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
