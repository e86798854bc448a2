"""The rollout worker: each command is one rollout, or several that share their first turns.

```
                        ┌─ turn n ─▶ ... ─▶ end     the trunk's own rollout
 turn 0 ─▶ .. ─▶ saved ─┼─ turn n ─▶ ... ─▶ end     a branch: a copy of the machine, its own seed
                        └─ turn n ─▶ ... ─▶ end
```
Shared turns are sampled once and stored as the trunk rollout's turns; a branch's `TurnSampled`
events begin after them. So the ledger counts every token once, and a branch trains on its own turns
with the trunk as context (`trajectories.own_turns`). Each branch is a full member of its group with
its own verdict, and the baseline is over all members (`advantages.trunk_advantage`).

After a crash, the log tells the two kinds apart: a rollout with a stored turn 0 began at the
prompt, one whose first stored turn comes after the trunk's is a branch.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, ClassVar

import msgspec

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.rollout_worker.episode import Episode
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Event, Stream
from penstock.messages.control import MessageRejected
from penstock.messages.generation import ReplicaReported
from penstock.messages.reading.rejected import read_rejected
from penstock.messages.rollout import RolloutFinished, Trunk, TurnSampled
from penstock.messages.task import StartRollout

log = logging.getLogger(__name__)


class Slots:
    """A bounded number of concurrent episodes, first come, first served."""

    def __init__(self, num_max: int) -> None:
        self._free = asyncio.Semaphore(num_max)
        self._num_held = 0

    @contextlib.asynccontextmanager
    async def hold(self, ctx: Context) -> AsyncGenerator[None]:
        """Wait for a slot and hold it during the block; the gauge `episodes` counts them."""
        async with self._free:
            self._count(ctx, 1)
            try:
                yield
            finally:
                self._count(ctx, -1)

    def _count(self, ctx: Context, change: int) -> None:
        self._num_held += change
        ctx.set_gauge("episodes", self._num_held)


class RolloutRunner:
    """Runs the episodes of one command: one, or a trunk with its branches."""

    def __init__(  # noqa: PLR0913, PLR0917 - all of a worker
        self,
        command: StartRollout,
        chat: ChatFormat,
        config: RolloutWorkerConfig,
        ctx: Context,
        slots: Slots,
        replicas: ReplicaTable,
    ) -> None:
        self._trunk = msgspec.structs.replace(command, branching=None)
        self._branches = _branch_commands(command)
        self._num_shared = command.branching.trunk_turns if command.branching else 0
        self._chat = chat
        self._config = config
        self._ctx = ctx
        self._slots = slots
        self._replicas = replicas

    async def run(self) -> list[RolloutFinished]:
        """Run every rollout without a stored end to a typed end, as slots allow.

        Raises:
            BusError: The bus failed; stored turns remain valid.

        """
        works: list[Coroutine[Any, Any, RolloutFinished]] = []
        if await self._is_open(self._trunk):
            episode = self._episode(self._trunk, fork_at=self._num_shared)
            works.append(self._in_slot(self._trunk, episode))
            forked = episode.forked
        else:
            # The trunk ended before a crash: its branches fork if it got as far as the fork.
            forked = asyncio.get_running_loop().create_future()
            forked.set_result(await self._has_turn(self._trunk, self._num_shared))
        works += [self._branch(one, forked) for one in self._branches if await self._is_open(one)]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # `gather` leaves the others running if one fails, and they would keep their machines.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abandon(self, cause: str, *, is_charged: bool) -> list[RolloutFinished]:
        """Report the rollouts that no worker will continue as failed.

        Args:
            cause: Reason for the record.
            is_charged: Whether the rollouts themselves are at fault.

        """
        ends: list[RolloutFinished] = []
        for command in (self._trunk, *self._branches):
            if await self._is_open(command):
                # With the trunk's turns, so that the record of an abandoned branch is complete.
                is_branch = command is not self._trunk and await self._left_trunk(command)
                episode = self._episode(command, is_branch=is_branch)
                ends.append(await episode.abandon(cause, is_charged=is_charged))
        return ends

    async def _branch(self, command: StartRollout, forked: asyncio.Future[bool]) -> RolloutFinished:
        is_branch = await self._left_trunk(command)
        if not is_branch and not await self._has_turn(command, 0):
            # Before it takes a slot: a branch that held one could keep its own trunk waiting.
            is_branch = await forked
        return await self._in_slot(command, self._episode(command, is_branch=is_branch))

    async def _in_slot(self, command: StartRollout, episode: Episode) -> RolloutFinished:
        async with self._slots.hold(self._ctx):
            try:
                return await episode.run()
            finally:
                self._replicas.leave(command.rollout_id)

    def _episode(
        self, command: StartRollout, *, is_branch: bool = False, fork_at: int = 0
    ) -> Episode:
        trunk = Trunk(rollout_id=self._trunk.rollout_id, num_turns=self._num_shared)
        return Episode(
            command,
            self._chat,
            self._config,
            self._ctx,
            self._replicas,
            trunk=trunk if is_branch else None,
            fork_at=fork_at,
        )

    async def _left_trunk(self, command: StartRollout) -> bool:
        """Return whether a rollout has stored turns, the first of them after the trunk's."""
        has_own = await self._has_turn(command, self._num_shared)
        return has_own and not await self._has_turn(command, 0)

    async def _has_turn(self, command: StartRollout, index: int) -> bool:
        return await self._ctx.last(TurnSampled, f"{command.rollout_id}.{index}") is not None

    async def _is_open(self, command: StartRollout) -> bool:
        return await self._ctx.last(RolloutFinished, command.rollout_id) is None


def _branch_commands(command: StartRollout) -> list[StartRollout]:
    if command.branching is None:
        return []
    return [
        msgspec.structs.replace(
            command,
            rollout_id=branch.rollout_id,
            member=branch.member,
            sampling=msgspec.structs.replace(command.sampling, seed=branch.seed),
            branching=None,
        )
        for branch in command.branching.branches
    ]


class RolloutWorker(Actor):
    """Takes commands from a work queue that all workers share.

    A command is acknowledged once the ends of its rollouts are stored. If a worker dies, the
    command is delivered again, and the next worker continues from the stored turns.
    """

    role = "rollout_worker"
    consumes: ClassVar[tuple[type[Event], ...]] = (StartRollout,)
    follows: ClassVar[tuple[type[Event], ...]] = (MessageRejected, ReplicaReported)
    tick_s = 1.0

    def __init__(self, chat: ChatFormat, config: RolloutWorkerConfig) -> None:
        self.num_concurrent = config.num_concurrent
        self._chat = chat
        self._config = config
        self._slots = Slots(config.num_concurrent)
        self._replicas = ReplicaTable()

    async def start(self, ctx: Context) -> Effects:
        """Log the limits."""
        config = self._config
        log.info(
            "%d episodes at once, groups %s, a saved state every %d turns",
            *(config.num_concurrent, "placed" if config.places_groups else "on any host"),
            config.checkpoint_turns,
        )
        return ()

    async def on_start_rollout(self, command: StartRollout, ctx: Context) -> Effects:
        """Run the command's rollouts that have no end yet."""
        return await self._runner(command, ctx).run()

    async def on_message_rejected(self, event: MessageRejected, ctx: Context) -> Effects:
        """Report a command whose delivery the bus gave up on as failed, or its group would wait."""
        if event.source_stream != Stream.TASKS:
            return ()
        command = await read_rejected(ctx.store, event, StartRollout)
        if command is None:
            return ()
        log.error("rollout %s: rejected by the bus: %s", command.rollout_id, event.cause)
        runner = self._runner(command, ctx)
        return await runner.abandon(f"rejected: {event.cause}", is_charged=event.is_charged)

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Record a generator replica."""
        self._replicas.add(event, ctx.monotonic())
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Forget silent replicas."""
        self._replicas.expire(ctx.monotonic())
        return ()

    def _runner(self, command: StartRollout, ctx: Context) -> RolloutRunner:
        return RolloutRunner(command, self._chat, self._config, ctx, self._slots, self._replicas)
