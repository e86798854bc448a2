"""The table of judges, the panel of additional judges, auxiliary scores, and episode lengths.

The verifiable judge decides the outcome; additional judges only add to the reward:

```
 Findings(outcome) ── solved, or failed with `judge.scores_failed` ──▶ auxiliary, rubric judges
                                                                            │ scores
        a judge that failed: masked (`on_failure = "mask"`), or no score ◀──┘
```
Auxiliary scores (style, communication, to-dos) count from 0 to 1 without a model, and enter with
small weights (`judge.auxiliary`).
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
"""Characters of a file that is linted; a longer file counts as one lint."""
_SHOWN_MAX = 3
# Brackets, so that the pattern does not match in this line.
_TODO = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X)\b|^\s*[-*+] \[ \] ")
_BOX = re.compile(r"^\s*(?:[-*+]|\d+[.)]) \[( |x|X)\] ", re.MULTILINE)
_STEM_CHARS_MIN = 3


def auxiliary_scores(submission: Submission, config: AuxiliaryConfig) -> list[JudgeScore]:
    """Return the scores that have a positive weight."""
    return [_SCORERS[name](submission) for name in config.weights]


def style(submission: Submission) -> JudgeScore:
    """Score lints (pyflakes) in the lines that the episode wrote: 1 / (1 + their number)."""
    lints = [lint for file in submission.files for lint in _lints(file)]
    return _counted("style", lints)


def todos(submission: Submission) -> JudgeScore:
    """Score to-dos in written lines, and open items of the plan in the final message."""
    left = [
        f"{file.path}:{number}: {line.strip()[:60]}"
        for file in submission.files
        for number, line in file.added_lines()
        if _TODO.search(line)
    ]
    left += ["open in its plan"] * _BOX.findall(submission.message).count(" ")
    return _counted("todos", left)


def communication(submission: Submission) -> JudgeScore:
    """Score the final message: half for existing, half for the share of changed files it names."""
    words = submission.message.casefold()
    if not words:
        return JudgeScore(judge="communication", version=VERSION, score=0.0, repeats=1)
    # Without changed files there is nothing to name, which counts as named.
    unnamed = [file.path for file in submission.files if not _mentions(words, file.path)]
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


def _mentions(words: str, path: str) -> bool:
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
    """All judges of a run except for the verifiable one.

    Raises:
        ConfigError: The settings name a key that does not exist.

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
        """Return the findings of a training rollout with the additional judges' scores."""
        has_scorers = self._judges or self._config.auxiliary.weights
        is_trained = rollout.finished.purpose is Purpose.TRAIN
        if not (has_scorers and is_trained and is_scored(findings.outcome, self._config)):
            return findings
        submission = read_submission(rollout, task, self._chat)
        scores = auxiliary_scores(submission, self._config.auxiliary)
        # Each judge bounds itself (`deadline_s`) and reports failures as scores of None.
        asked = await asyncio.gather(*(judge.score(submission) for judge in self._judges))
        scores += [score for each in asked for score in each]
        findings = msgspec.structs.replace(findings, scores=scores)
        failed = [
            f"judge {one.judge}, {one.criterion}: {one.detail}"
            for judge, each in zip(self._judges, asked, strict=True)
            if judge.config.on_failure == MASK
            for one in each
            if one.score is None
        ]
        if not failed:
            return findings
        outcome, detail = Outcome.JUDGE_ERROR, "; ".join(failed)
        return msgspec.structs.replace(findings, outcome=outcome, detail=detail)


def _answerer(
    config: RubricConfig, chat: ChatFormat, replicas: ReplicaTable, ctx: Context
) -> Answerer:
    if config.endpoint is not None:
        return Endpoint(config.endpoint)
    assert config.policy_version is not None, "`RubricConfig` requires one of the two"
    return Generators(config.policy_version, chat, replicas, ctx)


class LengthMeter:
    """Counts the tokens of episodes by kind, from their recorded turns.

    Args:
        chat: Chat format, whose markup separates the kinds.
        summary_request: Text that asks for a summary; not counted as tool output.

    """

    def __init__(self, chat: ChatFormat, summary_request: str) -> None:
        self._tokenizer = chat.tokenizer
        self._kinds = TokenKinds(chat.tokenizer)
        self._num_request = self._count(summary_request)

    def measure(self, rollout: RolloutFinished, turns: Sequence[Turn], task: Task) -> Lengths:
        """Return the lengths of an episode.

        Prompts cost nothing: a later segment's prompt repeats tokens that were already charged.
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
        # Markup of messages counts as tool output, too.
        steps = {end + 1: step for end, step in zip(rollout.step_ends, task.steps, strict=False)}
        num_returned = 0
        for index, turn in enumerate(rollout.turns[1:], 1):
            step = steps.get(index)
            # Such a context is a prompt or an instruction: no tool returned it.
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
    """Determines what a rollout achieved."""

    @property
    def name(self) -> str:
        """Name of the judge in verdicts."""
        ...

    @property
    def version(self) -> str:
        """Version, which changes whenever the same files could get another grade."""
        ...

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout; a failed machine is an outcome, not an exception."""
        ...


JUDGES: dict[str, Callable[[JudgeConfig], Judge]] = {
    HiddenTestsJudge.name: HiddenTestsJudge,
    ReportedJudge.name: ReportedJudge,
}


def make_judge(config: JudgeConfig) -> Judge:
    """Return the judge that the settings name.

    Raises:
        ConfigError: No judge has that name, or the named class is not a judge.

    """
    if is_reference(config.judge):
        own = cast("Callable[[JudgeConfig], Judge]", load_reference(config.judge, "judge.judge"))
        judge = own(config)
        if missing := [part for part in ("version", "judge") if not hasattr(judge, part)]:
            text = f"expected a judge, but it lacks {', '.join(missing)}"
            raise ConfigError(f"judge.judge: {config.judge!r}: {text}")
        return judge
    if config.judge not in JUDGES:
        choices = ", ".join(sorted(JUDGES))
        raise ConfigError(f"judge.judge: {config.judge!r} is none of {choices}")
    return JUDGES[config.judge](config)
