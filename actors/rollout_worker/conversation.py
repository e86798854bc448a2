"""The turns of one episode: tokens, end conditions, sampling, and storage in the log.

```
 segment 1   prompt │ turn 0 sampled │ observation │ turn 1 sampled │ observation, request │ summary
             └ context_ids ┘           └ context_ids ┘
 segment 2   prompt, summary │ turn 3 sampled │ observation │ ...
```
`Conversation` is pure. Sampled tokens are never tokenized again: the context of a turn is the
concatenation of its segment. If the task's limits allow several segments, a segment closes once its
context reaches the trigger; limits on turns and tokens hold over all segments. If the task has
several steps, a user message asks for the next one.

`Journal` reads and stores turns and saved states in the log. A turn that breaks off (its generator
died, paused, or fell silent) leaves no tokens behind: it is sampled again with the same seed, and
only stored turns (`TurnSampled`) count in the ledger.

```
 turn       0    1    2    3    4         stored as
 trunk      t0   t1   t2   t3   t4        <trunk>.0 .. <trunk>.4
 branch               b2   b3             <trunk>.0, <trunk>.1, <branch>.2, <branch>.3
```
A branch shares its trunk's first turns and states, and stores further turns under its own id. So
every sampled token is stored, and counted, once.
"""

import itertools
import logging
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from penstock.actors.policy.chat.format import ChatFormat, ChatMessage, OfferedTools, Role
from penstock.actors.policy.chat.summary import NoSummaryError, as_summary, read_summary
from penstock.actors.policy.replicas.client import stream_chunks
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import BrokenTurnError, SampledTokens, make_turn
from penstock.actors.policy.summaries import SummaryConfig, SummaryMode, restarted
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.in_progress import generate_item
from penstock.envs.harness.tools import functions_of, tools_prompt
from penstock.envs.tasks.changes import Changes
from penstock.kernels.arrays import from_array
from penstock.messages.control import CHARGES_MAX, ItemCharged, ItemQuarantined
from penstock.messages.episode import EpisodeSaved, EpisodeStepEnded
from penstock.messages.errors import (
    BusError,
    CodecError,
    DeadlineError,
    PenstockError,
    RemoteCallError,
)
from penstock.messages.generation import NEWEST, Generate, TokensSampled, pinned
from penstock.messages.reading.trajectories import load_turn
from penstock.messages.retries import RetryPolicy, with_retries
from penstock.messages.rollout import EpisodeEnd, EpisodeFiles, StopReason, Trunk, Turn, TurnSampled
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.task import Purpose, Sampling, StartRollout, Task

log = logging.getLogger(__name__)


class GenerationError(PenstockError, RuntimeError):
    """No generator sampled the turn in time."""


class ContextFullError(GenerationError):
    """The context exceeds the engine's; the text has both lengths."""


class TurnChargedError(GenerationError):
    """Engines failed at this turn, and not at others in the meantime."""


_FINAL = {RemoteErrorKind.INVALID, RemoteErrorKind.TOO_LONG, RemoteErrorKind.QUARANTINED}
_CHARGED = {RemoteErrorKind.CHARGED, RemoteErrorKind.QUARANTINED}


def channel_of(command: StartRollout) -> str:
    """Return the weights channel: an evaluation's pinned version, or the newest for training."""
    is_eval = command.purpose is Purpose.EVAL
    return pinned(command.policy_version) if is_eval else NEWEST


def turn_sampling(
    sampling: Sampling, index: int, num_tokens_max: int, stop_ids: tuple[int, ...]
) -> Sampling:
    """Return the sampling of turn `index`, with a seed derived from the rollout's."""
    seed = random.Random(f"turn.{sampling.seed}.{index}").getrandbits(31)
    return msgspec.structs.replace(
        sampling, seed=seed, num_tokens_max=num_tokens_max, stop_token_ids=stop_ids
    )


async def sample_turn(
    ctx: Context,
    replicas: ReplicaTable,
    request: Generate,
    retry: RetryPolicy,
    *,
    idle_s: float,
) -> SampledTokens:
    """Request a whole turn, with retries; a generator that is silent for `idle_s` has failed.

    Raises:
        ContextFullError: The engine cannot hold the context.
        TurnChargedError: Engines failed at this turn `CHARGES_MAX` times.
        GenerationError: The retries are used up, or the request is invalid.

    """
    num_charges = 0
    asked: set[str] = set()
    replicas.place(request.session_id, request.purpose, request.channel)
    attempts = itertools.count()

    async def attempt() -> SampledTokens:
        number = next(attempts)
        again = await _marked_suspect(ctx, request) if number else request
        # An id per attempt: a replica may still be busy with an earlier one.
        attempt_id = f"{request.request_id}.{number}"
        again = msgspec.structs.replace(again, request_id=attempt_id)
        chunks = stream_chunks(ctx, replicas, again, asked, idle_s=idle_s, reason=attempt_id)
        return await _whole_turn(chunks)

    def is_final(error: Exception) -> bool:
        nonlocal num_charges
        kind = getattr(error, "kind", "")
        num_charges += kind == RemoteErrorKind.CHARGED
        log.warning("%s: attempt failed: %s", request.request_id, error)
        return kind in _FINAL or num_charges >= CHARGES_MAX

    try:
        return await with_retries(
            attempt, retry, retry_on=(DeadlineError, RemoteCallError, BusError), is_final=is_final
        )
    except (DeadlineError, RemoteCallError, BusError) as error:
        raise _error_type(error)(f"{request.request_id}: {error}") from error


async def _marked_suspect(ctx: Context, request: Generate) -> Generate:
    """Return a request for another attempt.

    Raises:
        RemoteCallError: The request is quarantined.

    """
    item = generate_item(request.request_id)
    if await ctx.last(ItemQuarantined, item) is not None:
        raise RemoteCallError(RemoteErrorKind.QUARANTINED, "two generators died of this request")
    # A generator runs a suspect by itself, so that its death tells which request is to blame.
    is_suspect = await ctx.last(ItemCharged, f"{item}.1") is not None
    return msgspec.structs.replace(request, is_suspect=is_suspect)


def _error_type(error: Exception) -> type[GenerationError]:
    kind = getattr(error, "kind", "")
    if kind == RemoteErrorKind.TOO_LONG:
        return ContextFullError
    return TurnChargedError if kind in _CHARGED else GenerationError


async def _whole_turn(chunks: AsyncGenerator[TokensSampled]) -> SampledTokens:
    sampled = SampledTokens()
    async with aclosing(chunks):
        async for chunk in chunks:
            sampled.add(chunk)
    if sampled.stop_reason in {None, StopReason.ABORTED} or not sampled.token_ids:
        raise BrokenTurnError(f"the turn broke off after {len(sampled.token_ids)} tokens")
    return sampled


class Journal:
    """Reads and writes one episode's turns, saved states and step ends in the log."""

    def __init__(self, ctx: Context, command: StartRollout, trunk: Trunk | None) -> None:
        self._ctx = ctx
        self._command = command
        self._trunk = trunk

    @property
    def num_trunk_turns(self) -> int:
        """Number of turns that belong to the trunk."""
        return self._trunk.num_turns if self._trunk else 0

    async def turns(self, first: int = 0) -> list[Turn]:
        """Return the stored turns from `first` on."""
        turns: list[Turn] = []
        for index in range(first, self._command.task.limits.num_turns_max):
            event = await self._ctx.last(TurnSampled, f"{self._owner(index)}.{index}")
            if event is None:
                break
            turns.append(await load_turn(self._ctx.store, event.turn))
        return turns

    async def add(self, index: int, turn: Turn) -> list[Turn]:
        """Store a turn and return it, or the turns from there that another worker stored first."""
        command = self._command
        [receipt] = await self._ctx.publish(
            TurnSampled(
                rollout_id=command.rollout_id,
                group_id=command.group_id,
                purpose=command.purpose,
                turn_index=index,
                turn=turn,
            )
        )
        if not receipt.is_duplicate:
            return [turn]
        # A worker that was presumed dead got here first. Its turn counts, not this one.
        stored = await self.turns(index)
        if not stored:  # Some other message has that place in the log.
            raise CodecError(f"turn {command.rollout_id}.{index}: its place in the log is taken")
        log.warning("turn %s.%d: another worker stored it first", command.rollout_id, index)
        return stored

    async def saved_after(self, num_turns: int) -> EpisodeSaved | None:
        """Return the state that was saved after `num_turns` turns, or None."""
        owner = self._owner(num_turns - 1)
        return await self._ctx.last(EpisodeSaved, f"{owner}.{num_turns}")

    async def newest_saved(self, num_turns: int, *, above: int) -> EpisodeSaved | None:
        """Return the newest saved state within the first `num_turns` turns, after `above`."""
        for count in range(num_turns, above, -1):
            saved = await self.saved_after(count)
            if saved is not None:
                return saved
        return None

    async def has_step_end(self, turn_index: int) -> bool:
        """Return whether the end of the step that a turn ended is stored."""
        key = f"{self._owner(turn_index)}.{turn_index}"
        return await self._ctx.last(EpisodeStepEnded, key) is not None

    async def end_step(self, step: int, turn_index: int, left: Changes) -> None:
        """Store the files of a step that ended; the first to do so counts."""
        ended = EpisodeStepEnded(
            rollout_id=self._owner(turn_index),
            group_id=self._command.group_id,
            step=step,
            turn_index=turn_index,
            files=EpisodeFiles(changed=left.files, states=left.states),
            deleted=left.deleted,
        )
        await self._ctx.publish(ended)

    def _owner(self, index: int) -> str:
        if self._trunk is not None and index < self._trunk.num_turns:
            return self._trunk.rollout_id
        return self._command.rollout_id


def offered_tools(harness: str) -> OfferedTools:
    """Return the tools of a harness version, in both forms that prompts use."""
    return OfferedTools(words=tools_prompt(harness), schemas=functions_of(harness))


class Conversation:
    """The tokens of one episode, and when it ends.

    Call `append` with each turn, then `observe` with its results, unless the turn ended the episode
    or was a summary.
    """

    def __init__(
        self,
        chat: ChatFormat,
        task: Task,
        tools: OfferedTools,
        *,
        ends_on_parse_error: bool,
        summary: SummaryConfig | None = None,
    ) -> None:
        self.turns: list[Turn] = []
        self.end: EpisodeEnd | None = None
        self.step_ends: list[int] = []
        """Indices of the turns that ended a step, except for the last step."""
        self._chat = chat
        self._tools = tools
        self._task = task
        self._limits = task.limits
        self._window = task.limits.window_tokens_max or task.limits.num_tokens_max
        self._ends_on_parse_error = ends_on_parse_error
        self._summary = summary or SummaryConfig()
        self._num_summaries = 0
        self._num_segments = 1
        """Segments that appended turns belong to."""
        self._num_charged = 0
        """Tokens of the appended turns, without the prompts of later segments."""
        self._past: list[int] = []
        """Tokens of the segment up to the last turn."""
        self._context = self._prompt("")
        self.starts_segment = False
        """Whether the next turn starts a segment."""
        self.is_summary = False
        """Whether the next turn is a summary."""
        self._end_without_room()

    @property
    def token_ids(self) -> list[int]:
        """Whole context of the next turn."""
        return self._past + self._context

    @property
    def observation_ids(self) -> list[int]:
        """Tokens since the last turn; at the beginning of a segment, its prompt."""
        return self._context

    @property
    def routes_from(self) -> int:
        """First position whose routed experts no earlier turn of the segment has recorded."""
        return max(0, len(self._past) - 1)

    @property
    def num_tokens_next_max(self) -> int:
        """Maximum tokens of the next turn."""
        limits = self._limits
        longest = self._summary.num_tokens_max if self.is_summary else limits.turn_tokens_max
        # The prompt of a later segment is not charged again.
        new = 0 if self.starts_segment else len(self._context)
        left = limits.num_tokens_max - self._num_charged - new
        return min(longest, left, self._window - len(self._past) - len(self._context))

    def make_turn(self, sampled: SampledTokens, sampling: Sampling) -> Turn:
        """Parse sampled tokens into the next turn, without appending it."""
        turn = make_turn(self._chat, self._context, sampled, self._tools, sampling)
        if self.is_summary:
            is_withheld = self._summary.mode is SummaryMode.MASKED
            turn = as_summary(turn, self._summary_fault(turn), is_withheld=is_withheld)
        return msgspec.structs.replace(turn, starts_segment=self.starts_segment)

    def append(self, turn: Turn) -> None:
        """Append a turn, just sampled or read from the log."""
        self._take(turn)
        if turn.is_summary:
            return
        if turn.parse_error and self._ends_on_parse_error:
            self.end = EpisodeEnd.POLICY_ERROR
        elif not turn.parse_error and not turn.calls:
            self._finish([])

    def _take(self, turn: Turn) -> None:
        # A stored turn proves that the episode went on, whatever tools return in a replay.
        self.end = None
        self.turns.append(turn)
        if turn.starts_segment:
            self._past = []
            self._num_segments += 1
        context, sampled = from_array(turn.context_ids), from_array(turn.token_ids)
        self._num_charged += sampled.size + (0 if turn.starts_segment else context.size)
        self._past += context.tolist() + sampled.tolist()
        self._context = []
        self.starts_segment = self.is_summary = False
        if turn.is_summary:
            self._take_summary(turn)

    def resume(self, turns: Sequence[Turn], saved: EpisodeSaved) -> None:
        """Append the turns before a saved state, and restore the state."""
        for turn in turns:
            self._take(turn)
        self.end = None
        self._context = from_array(saved.observation_ids).tolist()
        self.starts_segment, self.is_summary = saved.starts_segment, saved.is_summary
        self.step_ends = list(saved.step_ends)
        if self.starts_segment:
            self._past = []

    def observe(self, results: Sequence[str], *, is_finished: bool) -> None:
        """Append the results of the last turn's calls, or its parse error, to the context."""
        if is_finished:
            self._finish(results)
        else:
            self._go_on(results)

    def _finish(self, results: Sequence[str]) -> None:
        if len(self.step_ends) == len(self._task.steps):
            self.end = EpisodeEnd.FINISHED
            return
        self.step_ends.append(len(self.turns) - 1)
        self._go_on(results, self._instruction)

    def _go_on(self, results: Sequence[str], request: str = "") -> None:
        observation = self._observation(results, request)
        self._context = observation or []
        if observation is None:  # Nothing can follow what the policy wrote.
            self.end = EpisodeEnd.POLICY_ERROR
        elif self._has_turn_left():
            if self._is_closing():
                self._close(results)
            self._end_without_room()

    @property
    def _instruction(self) -> str:
        step = len(self.step_ends)
        return self._task.steps[step - 1].instruction if step else self._task.instruction

    def _observation(self, results: Sequence[str], request: str = "") -> list[int] | None:
        turn = self.turns[-1]
        names = [call.name for call in turn.calls] or [""] * len(results)
        token_ids = from_array(turn.token_ids).tolist()
        return self._chat.render_observation(
            self._past[: -len(token_ids)],
            token_ids,
            list(zip(names, results, strict=True)),
            self._tools,
            request,
        )

    def _is_closing(self) -> bool:
        has_next = self._num_segments < self._limits.num_segments_max
        return has_next and self._summary.is_due(len(self.token_ids), self._window)

    def _close(self, results: Sequence[str]) -> None:
        if not self._summary.is_asked:
            self._begin("")
            return
        observation = self._observation(results, self._summary.request)
        if observation is None:
            self.end = EpisodeEnd.POLICY_ERROR
        else:
            self._context, self.is_summary = observation, True

    def _take_summary(self, turn: Turn) -> None:
        self._num_summaries += 1
        if turn.parse_error:  # No segment can follow without a summary: the policy's failure.
            is_cut = turn.stop_reason is StopReason.LENGTH
            self.end = EpisodeEnd.TOKEN_LIMIT if is_cut else EpisodeEnd.POLICY_ERROR
        elif self._has_turn_left():
            self._begin(self._read_summary(turn))
            self._end_without_room()

    def _begin(self, summary: str) -> None:
        self._past = []
        self._context = self._prompt(summary)
        self.starts_segment = True

    def _prompt(self, summary: str) -> list[int]:
        text = restarted(self._instruction, summary, self._num_summaries)
        message = ChatMessage(role=Role.USER, content=text)
        return self._chat.render_prompt([message], self._tools)

    def _summary_fault(self, turn: Turn) -> str:
        try:
            self._read_summary(turn)
        except NoSummaryError as error:
            return str(error)
        return ""

    def _read_summary(self, turn: Turn) -> str:
        token_ids, context_ids = from_array(turn.token_ids), from_array(turn.context_ids)
        return read_summary(self._chat, token_ids.tolist(), context_ids.tolist(), self._tools)

    def _has_turn_left(self) -> bool:
        """End the episode where its turns are used up."""
        if len(self.turns) < self._limits.num_turns_max:
            return True
        self.end = EpisodeEnd.TURN_LIMIT
        return False

    def _end_without_room(self) -> None:
        # Before a turn is requested: engines refuse requests for no tokens.
        if self.end is None and self.num_tokens_next_max < 1:
            self.end = EpisodeEnd.TOKEN_LIMIT
