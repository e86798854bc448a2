"""The judges: what each must offer, and the table that names them.

Manners of an episode, scored from 0 to 1 by counting: style, communication, to-dos. Pure.

None of it says whether the work is right: it is added to the reward of what was graded, with small
weights (`judge.auxiliary`).

The judges beside the verifiable one: asked about what was graded, never about its outcome.

```
 Findings(outcome) ── solved, or failed with `judge.scores_failed` ──▶ auxiliary, rubric judges
                                                                            │ scores
        a judge that failed: masked (`on_failure = "mask"`), or no score ◀──┘
```

What an episode spent, by kind, counted from its recorded turns. Pure.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import msgspec
from pyflakes.checker import Checker

from penstock.actors.judge.config import AuxiliaryConfig, JudgeConfig
from penstock.actors.judge.reported import ReportedJudge
from penstock.actors.judge.reward import Findings, is_scored
from penstock.actors.judge.rubric.config import MASK, RubricConfig
from penstock.actors.judge.rubric.endpoint import Endpoint
from penstock.actors.judge.rubric.generators import Generators
from penstock.actors.judge.rubric.judge import Answerer, RubricJudge
from penstock.actors.judge.submission import ChangedFile, Submission, read_submission
from penstock.actors.judge.task_steps import HiddenTestsJudge
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.token_kinds import TokenKinds
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.runtime.context import Context
from penstock.envs.python_source import PythonSourceError, parse_python
from penstock.envs.tasks.storage import GradedTask
from penstock.kernels.arrays import from_array
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import is_reference, load_reference
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.reward import JudgeScore, Lengths, Outcome
from penstock.messages.rollout import RolloutFinished, Turn
from penstock.messages.task import Purpose, Task

VERSION = "1"
LINTED_CHARS_MAX = 64 << 10
"""Of one file; a longer one counts as one lint."""
_SHOWN_MAX = 3
_TODO = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X)\b|^\s*[-*+] \[ \] ")
_BOX = re.compile(r"^\s*(?:[-*+]|\d+[.)]) \[( |x|X)\] ", re.MULTILINE)
_STEM_CHARS_MIN = 3


def auxiliary_scores(submission: Submission, config: AuxiliaryConfig) -> list[JudgeScore]:
    """Return the scores of those that have a weight."""
    return [_SCORERS[name](submission) for name in config.weights]


def style(submission: Submission) -> JudgeScore:
    """Score lints (pyflakes) in the lines that the episode wrote: 1 / (1 + their number)."""
    lints = [lint for file in submission.files for lint in _lints(file)]
    return _counted("style", lints)


def todos(submission: Submission) -> JudgeScore:
    """Score to-dos in the lines that it wrote, and what is open in its own last plan."""
    left = [
        f"{file.path}:{number}: {line.strip()[:60]}"
        for file in submission.files
        for number, line in file.added_lines()
        if _TODO.search(line)
    ]
    left += ["open in its plan"] * _BOX.findall(submission.message).count(" ")
    return _counted("todos", left)


def communication(submission: Submission) -> JudgeScore:
    """Score the final message: half for being there, half for the changed files that it names."""
    words = submission.message.casefold()
    if not words:
        return JudgeScore(judge="communication", version=VERSION, score=0.0, repeats=1)
    unnamed = [file.path for file in submission.files if not _names(words, file.path)]
    share = 1.0 - len(unnamed) / len(submission.files) if submission.files else 1.0
    detail = f"not named: {', '.join(unnamed[:_SHOWN_MAX])}" if unnamed else ""
    score = 0.5 + 0.5 * share
    return JudgeScore(judge="communication", version=VERSION, score=score, repeats=1, detail=detail)


_SCORERS: dict[str, Callable[[Submission], JudgeScore]] = {
    "style": style,
    "communication": communication,
    "todos": todos,
}


def _counted(judge: str, found: list[str]) -> JudgeScore:
    shown = "; ".join(found[:_SHOWN_MAX])
    detail = f"{len(found)}: {shown}" if found else ""
    score = 1.0 / (1.0 + len(found))
    return JudgeScore(judge=judge, version=VERSION, score=score, repeats=1, detail=detail)


def _names(words: str, path: str) -> bool:
    """Return whether a text names a file: its name, or its stem where that is a word."""
    name = path.rsplit("/", 1)[-1].casefold()
    stem = name.partition(".")[0]
    if name in words:
        return True
    is_word = re.search(rf"(?<!\w){re.escape(stem)}(?!\w)", words)
    return len(stem) >= _STEM_CHARS_MIN and is_word is not None


def _lints(file: ChangedFile) -> Iterator[str]:
    if file.after is None or not file.path.endswith(".py"):
        return
    if len(file.after) > LINTED_CHARS_MAX:
        yield f"{file.path}: too long to be linted"
        return
    added = {number for number, _ in file.added_lines()}
    try:
        found = Checker(parse_python(file.after), file.path, withDoctest=False).messages
    except (PythonSourceError, RecursionError) as error:
        yield f"{file.path}: {type(error).__name__}"
        return
    for one in found:
        if one.lineno in added:
            yield f"{file.path}:{one.lineno}: {one.message % one.message_args}"


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


class LengthMeter:
    """Counts by one chat format's markup."""

    def __init__(self, chat: ChatFormat, summary_request: str) -> None:
        """Take the chat format, and the words that ask for a summary, which no tool returned."""
        self._tokenizer = chat.tokenizer
        self._kinds = TokenKinds(chat.tokenizer)
        self._num_request = self._count(summary_request)

    def measure(self, rollout: RolloutFinished, turns: Sequence[Turn], task: Task) -> Lengths:
        """Return the lengths of an episode of a task.

        Prompts cost nothing: what a later segment reads again was charged where it was sampled.
        """
        counts = [
            self._kinds.count(
                from_array(turn.token_ids).tolist(),
                from_array(turn.context_ids).tolist(),
                is_final=not (turn.calls or turn.parse_error or turn.is_summary),
            )
            for turn in turns
        ]
        return Lengths(
            thinking=sum(one.thinking for one in counts),
            call=sum(one.call for one in counts),
            output=self._num_returned(rollout, turns, task),
            final=sum(one.final for one in counts),
            num_calls=rollout.num_calls,
            num_turns=len(rollout.turns),
        )

    def _num_returned(self, rollout: RolloutFinished, turns: Sequence[Turn], task: Task) -> int:
        """Count what contexts have of tools; the markup of messages counts as theirs."""
        steps = {end + 1: step for end, step in zip(rollout.step_ends, task.steps, strict=False)}
        num_returned = 0
        for index, turn in enumerate(rollout.turns[1:], 1):
            step = steps.get(index)
            if turn.starts_segment or (step and not turns[index - 1].calls):
                continue
            num_asked = self._num_request if turn.is_summary else 0
            if step and not turn.is_summary:
                num_asked = self._count(step.instruction)
            num_returned += max(0, turn.num_context - num_asked)
        return num_returned

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


class Judge(Protocol):
    """Finds out what a rollout achieved."""

    @property
    def name(self) -> str:
        """Its name in verdicts."""
        ...

    @property
    def version(self) -> str:
        """Goes up with every change to what it finds."""
        ...

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout; failures of machines are an outcome, not an error."""
        ...


JUDGES: dict[str, Callable[[JudgeConfig], Judge]] = {
    HiddenTestsJudge.name: HiddenTestsJudge,
    ReportedJudge.name: ReportedJudge,
}


def make_judge(config: JudgeConfig) -> Judge:
    """Return the judge that the settings name.

    Raises:
        ConfigError: There is none of that name, or own code that it names is no judge.

    """
    if is_reference(config.judge):
        own = cast("Callable[[JudgeConfig], Judge]", load_reference(config.judge, "judge.judge"))
        judge = own(config)
        if missing := [part for part in ("version", "judge") if not hasattr(judge, part)]:
            text = f"expected a judge, it has no {', '.join(missing)}"
            raise ConfigError(f"judge.judge: {config.judge!r}: {text}")
        return judge
    if config.judge not in JUDGES:
        choices = ", ".join(sorted(JUDGES))
        raise ConfigError(f"judge.judge: {config.judge!r} is none of {choices}")
    return JUDGES[config.judge](config)
