"""Asking a judge outside of a run, about many pieces of work."""

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


class Unwatched:
    """Waits that nobody but the caller sees."""

    @contextlib.asynccontextmanager
    async def waiting(self, target: str, reason: str, *, deadline_s: float) -> AsyncGenerator[None]:
        """Bound the body."""
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            raise DeadlineError(f"{target}: {reason}: not within {deadline_s:g} s") from error


def open_judge(config: RubricConfig) -> RubricJudge:
    """Return a judge with an endpoint, to be asked outside of a run; raises as `Endpoint` does."""
    assert config.endpoint is not None, "the caller refuses others"
    return RubricJudge(config, Endpoint(config.endpoint), Unwatched())


async def score_all(
    judge: RubricJudge, submissions: Sequence[Submission]
) -> list[list[JudgeScore]]:
    """Return the scores of each submission; some are asked about at once, each with its time."""
    slots = asyncio.Semaphore(judge.config.num_concurrent)

    async def score(submission: Submission) -> list[JudgeScore]:
        async with slots:
            return await judge.score(submission)

    return await asyncio.gather(*map(score, submissions))
