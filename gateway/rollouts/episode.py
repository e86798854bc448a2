"""One attempt at a task whose harness runs elsewhere: turns model requests into stored turns.

```
 request ─▶ context ids ─┬─ continue the tokens so far ─▶ turn: the new tokens are its context
                         └─ anything else ─────────────▶ turn that starts a segment
```
An agent may rewrite its history, compact it, or run side agents over the same route. Each request
that does not continue the previous one starts a segment, so every sampled token is trained in
exactly the context in which it was sampled. The task's limits apply to all segments together.
"""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import SampledTokens, make_turn
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.rollout_worker.conversation import (
    ContextFullError,
    GenerationError,
    Journal,
    TurnChargedError,
    channel_of,
    sample_turn,
    turn_sampling,
)
from penstock.actors.runtime.context import Context
from penstock.gateway.conversation import Delta, Finish, LiveRequest
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.exchange.plan import Plan, Planner, TokenCharge, sent_call
from penstock.gateway.exchange.reply import ReplyAssembler
from penstock.gateway.keys import hash_key
from penstock.kernels.arrays import to_array
from penstock.messages.errors import CodecError
from penstock.messages.generation import Generate
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    ToolCall,
    Turn,
)
from penstock.messages.task import StartRollout

log = logging.getLogger(__name__)


class EpisodeReply(msgspec.Struct, kw_only=True):
    """One complete reply; implements `LiveReply`."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    deltas: Sequence[Delta]
    text: str
    calls: Sequence[ToolCall]
    stop_text: str
    is_cut: bool
    context_ids: Sequence[int]
    index: int = 0
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()

    @property
    def finish(self) -> Finish:
        """Why the reply ended."""
        if self.stop_text:
            return Finish.STOP_TEXT
        if self.is_cut:
            return Finish.LENGTH
        return Finish.CALLS if self.calls else Finish.STOP


class ExternalEpisode:
    """An open attempt; answers its model requests one at a time."""

    def __init__(  # noqa: PLR0913, PLR0917 - all of the service
        self,
        command: StartRollout,
        chat: ChatFormat,
        planner: Planner,
        config: RolloutWorkerConfig,
        ctx: Context,
        replicas: ReplicaTable,
    ) -> None:
        """Create an attempt without turns."""
        self.command = command
        self.ended: asyncio.Future[RolloutFinished] = asyncio.get_running_loop().create_future()
        self._chat = chat
        self._planner = planner
        self._config = config
        self._ctx = ctx
        self._replicas = replicas
        self._journal = Journal(ctx, command, None)
        self._turns: list[Turn] = []
        self._past: list[int] = []
        """Tokens of the current segment."""
        self._num_charged = 0
        """Tokens of all turns; what a later segment reads again counts once more here."""
        self._limit: EpisodeEnd | None = None
        """The limit that the attempt has reached; further requests are refused."""
        # One at a time, because a turn's position in the attempt must be known when it is stored.
        self._lock = asyncio.Lock()
        self._last: tuple[str, EpisodeReply] | None = None
        self._started_at = ctx.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered, which counts as a sign of life."""
        return self._lock.locked()

    @property
    def num_turns(self) -> int:
        """Number of stored turns."""
        return len(self._turns)

    async def load_turns(self) -> int:
        """Take over the turns that an earlier process stored; return their number.

        Their client's conversation cannot be continued, but its tokens belong to the attempt.
        """
        self._turns = await self._journal.turns()
        return len(self._turns)

    async def answer(self, request: LiveRequest, body: bytes, *, is_retry: bool) -> EpisodeReply:
        """Sample one turn and store it.

        Args:
            request: The client's request.
            body: Its body, which identifies retries.
            is_retry: Whether the client marks the request as a retry.

        Raises:
            ApiError: 400, the request cannot be answered; 409, the attempt is over or has reached
                a limit; 503, no generator answers.

        """
        if request.num_choices != 1:
            raise invalid("expected 1: an attempt has one reply per request", "n")
        if request.num_top_logprobs:
            raise invalid("not supported for an attempt: leave it out", "top_logprobs")
        digest = hashlib.sha256(body).hexdigest()
        async with self._lock:
            # A retry after a lost response must neither become a second turn nor be refused at a
            # limit.
            if is_retry and self._last is not None and self._last[0] == digest:
                return self._last[1]
            self._check_open()
            reply = await self._next(request)
            self._last = (digest, reply)
            return reply

    async def end(
        self,
        end: EpisodeEnd,
        *,
        reward: float | None = None,
        files: EpisodeFiles | None = None,
        deleted: Sequence[str] = (),
        error: str = "",
    ) -> None:
        """End the attempt; the first end counts."""
        # Wait for the request in progress, whose turn belongs to the attempt.
        async with self._lock:
            if self.ended.done():
                return
            if self._limit is not None and end is EpisodeEnd.FINISHED:
                end = self._limit
            self.ended.set_result(self._finished(end, reward, files, deleted, error))

    def _check_open(self) -> None:
        if self.ended.done():
            raise ApiError(409, "rollout_ended", "the attempt is over")
        limits = self.command.task.limits
        if self._limit is None and len(self._turns) >= limits.num_turns_max:
            self._limit = EpisodeEnd.TURN_LIMIT
        if self._limit is not None:
            text = f"the attempt has reached its {self._limit}: end it with its reward"
            raise ApiError(409, str(self._limit), text)

    async def _next(self, request: LiveRequest) -> EpisodeReply:
        rollout_id, index = self.command.rollout_id, len(self._turns)
        plan = await self._planner.plan(
            request,
            key_id=rollout_id,
            session=(("", rollout_id), rollout_id),
            seed=0,
            charge=TokenCharge(),
        )
        context = plan.context_ids
        continues = bool(self._past) and context[: len(self._past)] == self._past
        starts_segment = bool(self._turns) and not continues
        new = context[len(self._past) :] if continues else context
        sampled, turn = await self._sampled(plan, index, new, starts_segment=starts_segment)
        stored = await self._journal.add(index, turn)
        if stored[0] is not turn:
            raise CodecError(f"turn {rollout_id}.{index}: another process stored it first")
        self._turns.append(turn)
        self._past = [*context, *sampled.token_ids]
        self._num_charged += len(new) + len(sampled.token_ids)
        log.debug("turn %s.%d: %d tokens", rollout_id, index, len(sampled.token_ids))
        return self._reply(request, plan, sampled, f"{rollout_id}.{index}")

    async def _sampled(
        self, plan: Plan, index: int, new: list[int], *, starts_segment: bool
    ) -> tuple[SampledTokens, Turn]:
        command, limits = self.command, self.command.task.limits
        left = limits.num_tokens_max - self._num_charged - len(new)
        num_max = min(plan.sampling.num_tokens_max, limits.turn_tokens_max, left)
        if num_max < 1:
            self._limit = EpisodeEnd.TOKEN_LIMIT
            self._check_open()
        # The run's temperature and seeds, not the client's: the recorded behavior must be the
        # trained one.
        sampling = turn_sampling(command.sampling, index, num_max, plan.sampling.stop_token_ids)
        sampling = msgspec.structs.replace(sampling, grammar=plan.sampling.grammar)
        is_fresh = starts_segment or index == 0
        request = Generate(
            request_id=self._ctx.new_id(f"{command.rollout_id}.{index}"),
            session_id=command.rollout_id,
            purpose=command.purpose,
            channel=channel_of(command),
            token_ids=to_array(np.array(plan.context_ids, np.int32)),
            sampling=sampling,
            routes_from=0 if is_fresh else max(0, len(self._past) - 1),
        )
        retry, idle_s = self._config.retry, self._config.generate_idle_s
        try:
            sampled = await sample_turn(self._ctx, self._replicas, request, retry, idle_s=idle_s)
        except GenerationError as error:
            raise self._failed(error) from error
        turn = make_turn(self._chat, new, sampled, plan.tools, sampling)
        return sampled, msgspec.structs.replace(turn, starts_segment=starts_segment)

    def _failed(self, error: GenerationError) -> ApiError:
        """Return the error for a turn that no generator sampled; some errors end the attempt."""
        if isinstance(error, ContextFullError):
            self._limit = EpisodeEnd.TOKEN_LIMIT
            return ApiError(400, "context_length_exceeded", str(error), "messages")
        is_charged = isinstance(error, TurnChargedError)
        end = EpisodeEnd.POLICY_ERROR if is_charged else EpisodeEnd.INFRASTRUCTURE_ERROR
        self.ended.set_result(self._finished(end, None, None, (), str(error)))
        return ApiError(503, "no_generator", "no generator gave this turn; the attempt is over")

    def _reply(
        self, request: LiveRequest, plan: Plan, sampled: SampledTokens, request_id: str
    ) -> EpisodeReply:
        tools = request.offered
        stops = request.sampling.stops
        assembler = ReplyAssembler(self._chat, tools, plan.context_ids, plan.tools, stops)
        deltas = [*assembler.push(sampled.token_ids), *assembler.finish()]
        ids = sampled.token_ids
        if ids[-1] in self._chat.stop_ids and not assembler.stop_text:
            calls = [sent_call(call, tools).made for call in assembler.calls]
            self._planner.memory.put(plan.owner, plan.session_id, assembler.text, calls, ids)
        return EpisodeReply(
            request_id=request_id,
            token_ids=ids,
            logprobs=sampled.logprobs,
            deltas=deltas,
            text=assembler.text,
            calls=assembler.calls,
            stop_text=assembler.stop_text,
            is_cut=sampled.stop_reason is StopReason.LENGTH,
            context_ids=plan.context_ids,
        )

    def _finished(
        self,
        end: EpisodeEnd,
        reward: float | None,
        files: EpisodeFiles | None,
        deleted: Sequence[str],
        error: str,
    ) -> RolloutFinished:
        command = self.command
        return RolloutFinished(
            rollout_id=command.rollout_id,
            group_id=command.group_id,
            group_index=command.group_index,
            group_size=command.group_size,
            member=command.member,
            purpose=command.purpose,
            task_id=command.task.task_id,
            category=command.task.category,
            source=command.task.source,
            end=end,
            turns=[turn.summary for turn in self._turns],
            files=files or EpisodeFiles(),
            deleted=list(deleted),
            num_calls=sum(len(turn.calls) for turn in self._turns),
            num_invalid_calls=sum(bool(turn.parse_error) for turn in self._turns),
            wall_s=self._ctx.monotonic() - self._started_at,
            error=error,
            tool_names=[[call.name[:64] for call in turn.calls] for turn in self._turns],
            reported_reward=reward,
        )


class OpenAttempt:
    """An attempt that a client may take, or has taken."""

    def __init__(self, episode: ExternalEpisode, now: float) -> None:
        """Create an attempt that waits for a client."""
        self.episode = episode
        self.key = ""
        """Bearer key of the client that took it; empty until then."""
        self.seen_at = now
        """Last sign of life of its client, or when it began to wait; monotonic seconds."""

    def admits(self, key: str) -> bool:
        """Return whether this is the attempt's key."""
        # Compare hashes: a header may have any bytes, and the timing of a comparison reveals
        # nothing.
        return bool(self.key) and hmac.compare_digest(hash_key(self.key), hash_key(key))
