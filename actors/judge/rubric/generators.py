"""Answers a judge's questions with the run's own replicas of one policy version.

Only replicas pinned to the version are asked (`regions.channel = "version:N"`), so the judge does
not change during training. The grammar allows only the letters.
"""

from contextlib import aclosing

import numpy as np

from penstock.actors.judge.rubric.judge import (
    JudgeAnswer,
    JudgeRefusedError,
    JudgeServiceError,
    TextRefusedError,
)
from penstock.actors.judge.rubric.question import JudgeQuestion
from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, UnrenderableError
from penstock.actors.policy.replicas.client import stream_chunks
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import SampledTokens
from penstock.actors.runtime.context import Context
from penstock.kernels.arrays import to_array
from penstock.messages.errors import BusError, DeadlineError, RemoteCallError
from penstock.messages.generation import Generate, pinned
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.task import Grammar, Purpose, Sampling

ANSWER_S_MAX = 60.0
ANSWER_TOKENS_MAX = 8


class Generators:
    """Replicas of one version."""

    def __init__(
        self, policy_version: int, chat: ChatFormat, replicas: ReplicaTable, ctx: Context
    ) -> None:
        self._policy_version = policy_version
        self._chat = chat
        self._replicas = replicas
        self._ctx = ctx

    async def answer(self, question: JudgeQuestion) -> JudgeAnswer:
        """Sample one letter greedily; see `Answerer`."""
        try:
            context = self._chat.render_prompt(question.messages, OfferedTools())
        except UnrenderableError as error:
            raise TextRefusedError(str(error)) from error
        letters = " | ".join(f'"{letter}"' for letter in question.letters)
        request = Generate(
            request_id=self._ctx.new_id("judge"),
            session_id=question.session_id,
            purpose=Purpose.LIVE,
            channel=pinned(self._policy_version),
            token_ids=to_array(np.asarray(context, np.int32)),
            sampling=Sampling(
                temperature=0.0,
                grammar=Grammar(text=f"start: {letters}\n"),
                num_tokens_max=ANSWER_TOKENS_MAX,
                stop_token_ids=self._chat.stop_ids,
            ),
            deadline_s=ANSWER_S_MAX,
        )
        sampled = await self._sampled(request)
        stop_ids = set(self._chat.stop_ids)
        ids = [token for token in sampled.token_ids if token not in stop_ids]
        return JudgeAnswer(
            text=self._chat.tokenizer.decode(ids),
            answered_by=f"version {self._policy_version}",
            num_prompt_tokens=len(context),
            num_reply_tokens=len(sampled.token_ids),
        )

    async def _sampled(self, request: Generate) -> SampledTokens:
        sampled = SampledTokens()
        reason = f"a letter for {request.session_id}"
        try:
            chunks = stream_chunks(
                self._ctx, self._replicas, request, set(), idle_s=ANSWER_S_MAX, reason=reason
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    sampled.add(chunk)
        except RemoteCallError as error:
            raise _failure(error) from error
        except (BusError, DeadlineError) as error:
            raise JudgeServiceError(f"{type(error).__name__}: {error}") from error
        if sampled.stop_reason is None:
            raise JudgeServiceError(f"{request.request_id}: the answer broke off")
        return sampled


def _failure(error: RemoteCallError) -> Exception:
    if error.kind == RemoteErrorKind.TOO_LONG:
        return TextRefusedError(str(error))
    is_final = error.kind == RemoteErrorKind.INVALID
    return (JudgeRefusedError if is_final else JudgeServiceError)(str(error))
