"""A rubric judge: asks about every criterion, with repeats; a failure is a score of None.

```
 submission ─▶ criterion x repeat ─▶ answerer ─▶ letter ─▶ mean per criterion, disagreement
                    ▲                   │
                    └───── retry ───────┤ unreadable or refused text: the lowest score
                                        └ service failed: None; after several failures the judge
                                          is not asked for `down_s`
```
Whatever the policy can cause (a reply other than a letter, a text that the service refuses) gets
the lowest score; failures of the service are never scored.
"""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from penstock.actors.judge.rubric.config import CriterionConfig, RubricConfig
from penstock.actors.judge.rubric.fence import new_nonce
from penstock.actors.judge.rubric.question import JudgeQuestion, ask, read_answer, rubric_digest
from penstock.actors.judge.submission import Submission
from penstock.messages.errors import DeadlineError, PenstockError
from penstock.messages.retries import RetryPolicy, with_retries
from penstock.messages.reward import JudgeScore

log = logging.getLogger(__name__)

DOWN_AFTER = 3
"""Submissions in a row that a service must fail before it is not asked for `down_s`."""
_PAUSES_MAX = 8
_DETAIL_CHARACTERS_MAX = 200


class JudgeServiceError(PenstockError, ConnectionError):
    """The service gave no valid answer; a retry may help."""


class JudgeRefusedError(PenstockError, ConnectionError):
    """The service refuses the address, the key or the model name; a retry does not help."""


class TextRefusedError(PenstockError, ValueError):
    """The service refuses the policy's text."""


class UnreadableAnswerError(PenstockError, ValueError):
    """The answer is not one of the letters."""


class JudgeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A reply to one question."""

    text: str
    answered_by: str
    """Model name that the service reported, or the policy version."""
    num_prompt_tokens: int = 0
    num_reply_tokens: int = 0


class Answerer(Protocol):
    """Answers a judge's questions."""

    async def answer(self, question: JudgeQuestion) -> JudgeAnswer:
        """Return the reply.

        Raises:
            JudgeServiceError: The service gave no valid reply.
            JudgeRefusedError: The service will refuse every question.
            TextRefusedError: The service will refuse this question.

        """
        ...


class JudgeWaits(Protocol):
    """Publishes waits: `Context` in a run, nothing in a command."""

    def waiting(
        self, target: str, reason: str, *, deadline_s: float
    ) -> AbstractAsyncContextManager[None]:
        """Bound the body; see `Context.waiting`."""
        ...


class _Tally:
    """Answers on one criterion."""

    def __init__(self, criterion: CriterionConfig) -> None:
        self.criterion = criterion
        self.scores: list[float] = []
        self.is_asked = True
        self.failure = ""
        self.note = ""
        self.answered_by = ""
        self.num_prompt_tokens = self.num_reply_tokens = 0
        self.duration_s = 0.0

    def add(self, answer: JudgeAnswer) -> None:
        """Count a reply's cost, whatever it says."""
        self.answered_by = answer.answered_by
        self.num_prompt_tokens += answer.num_prompt_tokens
        self.num_reply_tokens += answer.num_reply_tokens

    def score(self, judge: str, digest: str) -> JudgeScore:
        """Return the result."""
        scores = self.scores
        return JudgeScore(
            judge=judge,
            version=f"{digest}/{self.answered_by}",
            criterion=self.criterion.name,
            score=sum(scores) / len(scores) if scores else None,
            repeats=len(scores) if self.is_asked else 0,
            disagreement=max(scores) - min(scores) if scores else 0.0,
            num_prompt_tokens=self.num_prompt_tokens,
            num_reply_tokens=self.num_reply_tokens,
            duration_ms=1e3 * self.duration_s,
            detail=(self.failure or self.note)[:_DETAIL_CHARACTERS_MAX],
        )


class RubricJudge:
    """One judge of `judge.judges`."""

    def __init__(self, config: RubricConfig, answerer: Answerer, waits: JudgeWaits) -> None:
        self.config = config
        self.digest = rubric_digest(config)
        self._answerer = answerer
        self._waits = waits
        self._slots = asyncio.Semaphore(config.num_concurrent)
        self._num_failed = 0
        self._down_until = 0.0
        self._cause = ""

    async def score(self, submission: Submission) -> list[JudgeScore]:
        """Return one score per criterion; failures of the service are scores of None."""
        tallies = [_Tally(criterion) for criterion in self.config.criteria]
        if submission.is_empty:
            for tally in tallies:
                tally.scores = [min(tally.criterion.choices.values())]
                tally.is_asked = False
                tally.note = "nothing was submitted: not asked"
        elif asyncio.get_running_loop().time() < self._down_until:
            for tally in tallies:
                tally.failure = f"down, not asked: {self._cause}"
        else:
            await self._ask_all(submission, tallies)
            self._note_health(tallies)
        return [tally.score(self.config.name, self.digest) for tally in tallies]

    async def _ask_all(self, submission: Submission, tallies: list[_Tally]) -> None:
        config = self.config
        reason = f"{len(tallies)} criteria of {submission.sample_id}"
        try:
            async with (
                self._waits.waiting(f"judge.{config.name}", reason, deadline_s=config.deadline_s),
                asyncio.TaskGroup() as calls,
            ):
                # `_slots` bounds how many of them call at once, over all rollouts.
                for tally in tallies:
                    for repeat in range(config.repeats):
                        calls.create_task(self._ask_one(submission, tally, repeat))
        except DeadlineError:
            for tally in tallies:
                # Scores that arrived in time still count; only missing ones are a failure.
                if len(tally.scores) < config.repeats:
                    tally.failure = tally.failure or f"no answer in {config.deadline_s:g} s"

    async def _ask_one(self, submission: Submission, tally: _Tally, repeat: int) -> None:
        criterion, config = tally.criterion, self.config
        is_structured = config.endpoint is not None and config.endpoint.structured

        async def attempt() -> float:
            # A nonce per attempt: an answer may have leaked the previous one to the policy's text.
            question = ask(config, criterion, submission, repeat, new_nonce())
            answer = await self._answerer.answer(question)
            tally.add(answer)
            score = read_answer(answer.text, question, is_structured=is_structured)
            if score is None:
                raise UnreadableAnswerError(f"no letter alone: {answer.text[:80]!r}")
            return score

        retry = RetryPolicy(
            pause_s=config.retry_delay_s,
            pause_s_max=_PAUSES_MAX * config.retry_delay_s,
            num_attempts_max=config.num_attempts_max,
        )
        async with self._slots:
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            try:
                retried = (JudgeServiceError, UnreadableAnswerError)
                tally.scores.append(await with_retries(attempt, retry, retry_on=retried))
            # The policy's text caused it, so it must not be better off than with a bad answer.
            except (UnreadableAnswerError, TextRefusedError) as error:
                tally.scores.append(min(criterion.choices.values()))
                tally.note = f"lowest score: {error}"
            except (JudgeServiceError, JudgeRefusedError) as error:
                tally.failure = str(error)
            finally:
                tally.duration_s += loop.time() - began_at

    def _note_health(self, tallies: list[_Tally]) -> None:
        if any(tally.scores for tally in tallies):
            self._num_failed = 0
            return
        self._num_failed += 1
        self._cause = tallies[0].failure
        if self._num_failed >= DOWN_AFTER:
            # A pause, because each rollout would otherwise wait for the full deadline.
            now = asyncio.get_running_loop().time()
            self._down_until = now + self.config.down_s
            name, down_s = self.config.name, self.config.down_s
            log.warning(
                "judge %s: %d rollouts failed in a row, not asked for %g s: %s",
                *(name, self._num_failed, down_s, self._cause),
            )
