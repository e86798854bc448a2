"""An episode's turns: sampled whole from a generator, or read from the log; and its saved states.

A turn that broke off (its generator died, paused, or fell silent) leaves no tokens behind: it is
sampled again with the same seed, and only what is stored as `TurnSampled` counts as generated in
the ledger.

```
 turn       0    1    2    3    4         stored as
 trunk      t0   t1   t2   t3   t4        <trunk>.0 .. <trunk>.4
 branch               b2   b3             <trunk>.0, <trunk>.1, <branch>.2, <branch>.3
```
A branch shares its trunk's first turns and states; what it adds bears its own name. So every
sampled token is stored, and counted, once.
"""

import itertools
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from penstock.actors.policy.replicas.client import stream_chunks
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import BrokenTurnError, SampledTokens
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.in_progress import generate_item
from penstock.envs.tasks.changes import Changes
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
from penstock.messages.rollout import EpisodeFiles, StopReason, Trunk, Turn, TurnSampled
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.task import Purpose, Sampling, StartRollout


class GenerationError(PenstockError, RuntimeError):
    """No generator gave this turn within the time there was."""


class ContextFullError(GenerationError):
    """The context is longer than the engine's; the text has both lengths."""


class TurnChargedError(GenerationError):
    """Engines failed at this very turn, and at others in the meantime not."""


_FINAL = {RemoteErrorKind.INVALID, RemoteErrorKind.TOO_LONG, RemoteErrorKind.QUARANTINED}
_CHARGED = {RemoteErrorKind.CHARGED, RemoteErrorKind.QUARANTINED}


def channel_of(command: StartRollout) -> str:
    """Return what may answer: an evaluation is of one version, training takes the newest."""
    is_eval = command.purpose is Purpose.EVAL
    return pinned(command.policy_version) if is_eval else NEWEST


def turn_sampling(
    sampling: Sampling, index: int, num_tokens_max: int, stop_ids: tuple[int, ...]
) -> Sampling:
    """Return how turn `index` is drawn; its seed follows from the rollout's and the index."""
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
    """Ask until a generator gives the whole turn; one that is silent for `idle_s` has failed.

    Each attempt has an id of its own: a replica may still be busy with an earlier one.

    Returns:
        The turn.

    Raises:
        ContextFullError: The engine cannot hold the context.
        TurnChargedError: Engines failed at this very turn, `CHARGES_MAX` times.
        GenerationError: The policy gave up, or the request itself is invalid.

    """
    num_charges = 0
    asked: set[str] = set()
    replicas.place(request.session_id, request.purpose, request.channel)
    attempts = itertools.count()

    async def attempt() -> SampledTokens:
        number = next(attempts)
        again = await _as_charged(ctx, request) if number else request
        attempt_id = f"{request.request_id}.{number}"
        again = msgspec.structs.replace(again, request_id=attempt_id)
        chunks = stream_chunks(ctx, replicas, again, asked, idle_s=idle_s, reason=attempt_id)
        return await _whole_turn(chunks)

    def is_final(error: Exception) -> bool:
        nonlocal num_charges
        kind = getattr(error, "kind", "")
        num_charges += kind == RemoteErrorKind.CHARGED
        return kind in _FINAL or num_charges >= CHARGES_MAX

    try:
        return await with_retries(
            attempt, retry, retry_on=(DeadlineError, RemoteCallError, BusError), is_final=is_final
        )
    except (DeadlineError, RemoteCallError, BusError) as error:
        raise _given_up(error)(f"{request.request_id}: {error}") from error


async def _as_charged(ctx: Context, request: Generate) -> Generate:
    """Return a request that failed as it is to be tried again: if generators died, by itself.

    Raises:
        RemoteCallError: It is not to be tried again.

    """
    item = generate_item(request.request_id)
    if await ctx.last(ItemQuarantined, item) is not None:
        raise RemoteCallError(RemoteErrorKind.QUARANTINED, "generators died of this request twice")
    is_suspect = await ctx.last(ItemCharged, f"{item}.1") is not None
    return msgspec.structs.replace(request, is_suspect=is_suspect)


def _given_up(error: Exception) -> type[GenerationError]:
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
    """Reads and writes one episode's record."""

    def __init__(self, ctx: Context, command: StartRollout, trunk: Trunk | None) -> None:
        self._ctx = ctx
        self._command = command
        self._trunk = trunk

    @property
    def num_trunk_turns(self) -> int:
        """Turns that are another rollout's."""
        return self._trunk.num_turns if self._trunk else 0

    async def turns(self, first: int = 0) -> list[Turn]:
        """Return the stored turns from an index on, as far as they go."""
        turns: list[Turn] = []
        for index in range(first, self._command.task.limits.num_turns_max):
            event = await self._ctx.last(TurnSampled, f"{self._owner(index)}.{index}")
            if event is None:
                break
            turns.append(await load_turn(self._ctx.store, event.turn))
        return turns

    async def add(self, index: int, turn: Turn) -> list[Turn]:
        """Store a turn; where another incarnation stored it first, return its turns from there."""
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
        stored = await self.turns(index)
        if not stored:  # Some other message has its place in the log.
            raise CodecError(f"turn {command.rollout_id}.{index}: its place in the log is taken")
        return stored

    async def saved_after(self, num_turns: int) -> EpisodeSaved | None:
        """Return the state after that many turns, if it was saved."""
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
        """Return whether it is stored what the step left that a turn ended."""
        key = f"{self._owner(turn_index)}.{turn_index}"
        return await self._ctx.last(EpisodeStepEnded, key) is not None

    async def end_step(self, step: int, turn_index: int, left: Changes) -> None:
        """Store that; the first to do so counts."""
        ended = EpisodeStepEnded(
            rollout_id=self._owner(turn_index),
            group_id=self._command.group_id,
            step=step,
            turn_index=turn_index,
            files=EpisodeFiles(changed=left.files),
            deleted=left.deleted,
        )
        await self._ctx.publish(ended)

    def _owner(self, index: int) -> str:
        """Return the rollout whose turn this is."""
        if self._trunk is not None and index < self._trunk.num_turns:
            return self._trunk.rollout_id
        return self._command.rollout_id
