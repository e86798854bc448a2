"""Asks a judge about many pieces of work outside of a run."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from penstock.actors.judge.rubric.config import RubricConfig
from penstock.actors.judge.rubric.endpoint import Endpoint
from penstock.actors.judge.rubric.judge import RubricJudge
from penstock.actors.judge.submission import Submission
from penstock.messages.errors import DeadlineError, PenstockError
from penstock.messages.reward import JudgeScore


class JudgeSilentError(PenstockError, ConnectionError):
    """A judge gave no score; the text says why."""


class LocalWaits:
    """Waits of a command, which are not published; see `JudgeWaits`."""

    @contextlib.asynccontextmanager
    async def waiting(self, target: str, reason: str, *, deadline_s: float) -> AsyncGenerator[None]:
        """Raise `DeadlineError` if the body takes too long."""
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            raise DeadlineError(f"{target}: {reason}: not within {deadline_s:g} s") from error


def open_judge(config: RubricConfig) -> RubricJudge:
    """Return a judge for use outside of a run; raises what `Endpoint` raises."""
    assert config.endpoint is not None, "the caller refuses judges without an endpoint"
    return RubricJudge(config, Endpoint(config.endpoint), LocalWaits())


async def score_all(
    judge: RubricJudge, submissions: Sequence[Submission]
) -> list[list[JudgeScore]]:
    """Return the scores of each submission, `num_concurrent` at once."""
    # A slot before the judge's own deadline begins: queued submissions do not run out of time.
    slots = asyncio.Semaphore(judge.config.num_concurrent)

    async def score(submission: Submission) -> list[JudgeScore]:
        async with slots:
            return await judge.score(submission)

    return await asyncio.gather(*map(score, submissions))
