"""The rollout worker: commands, each one rollout or several that share their first turns.

```
                        ┌─ turn n ─▶ ... ─▶ end     the trunk's own rollout
 turn 0 ─▶ .. ─▶ saved ─┼─ turn n ─▶ ... ─▶ end     a branch: a copy of the machine, its own seed
                        └─ turn n ─▶ ... ─▶ end
```
What is shared is sampled once and stored as the trunk rollout's turns; a branch's `TurnSampled`
begin after it. So the ledger counts every token once, and a branch trains on its own turns with
the trunk as context (`trajectories.own_turns`). Groups stay whole: each branch is a member with
a verdict of its own, and the group's baseline is over all members (`advantages.trunk_advantage`).

After a crash the log decides what each rollout is: one with a stored turn 0 began at the prompt,
one whose first stored turn comes after the trunk's is a branch.
"""

import asyncio
import contextlib
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


class Slots:
    """Room for some episodes; who comes first is served first."""

    def __init__(self, num_max: int) -> None:
        """Begin with all of them free."""
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
    """Carries out one command; without branches it is one episode.

    Args:
        command: Nothing is asked of anyone before `run`.
        chat: Format of the policy.
        config: Bounds.
        ctx: The worker's.
        slots: Each of its episodes needs one of the worker's.
        replicas: Of generators, as the worker sees them.

    """

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
        """Run every rollout that has no end yet to a typed end, as many at once as have slots.

        Raises:
            BusError: The bus failed; what is stored stands.

        """
        works: list[Coroutine[Any, Any, RolloutFinished]] = []
        if await self._is_open(self._trunk):
            episode = self._episode(self._trunk, fork_at=self._num_shared)
            works.append(self._in_slot(self._trunk, episode))
            forked = episode.forked
        else:
            forked = asyncio.get_running_loop().create_future()
            forked.set_result(await self._has_turn(self._trunk, self._num_shared))
        works += [self._branch(one, forked) for one in self._branches if await self._is_open(one)]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abandon(self, cause: str, *, is_charged: bool) -> list[RolloutFinished]:
        """Report the rollouts that no worker will continue as failed.

        Args:
            cause: Why, for the record.
            is_charged: Whether what they did, and not the outside, is at fault.

        """
        ends: list[RolloutFinished] = []
        for command in (self._trunk, *self._branches):
            if await self._is_open(command):
                is_branch = command is not self._trunk and await self._left_trunk(command)
                episode = self._episode(command, is_branch=is_branch)
                ends.append(await episode.abandon(cause, is_charged=is_charged))
        return ends

    async def _branch(self, command: StartRollout, forked: asyncio.Future[bool]) -> RolloutFinished:
        is_branch = await self._left_trunk(command)
        if not is_branch and not await self._has_turn(command, 0):
            is_branch = await forked
        return await self._in_slot(command, self._episode(command, is_branch=is_branch))

    async def _in_slot(self, command: StartRollout, episode: Episode) -> RolloutFinished:
        """Run an episode that waits for no other one: each holder of a slot gets to its end."""
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
        """Return whether a rollout has turns after the trunk's, and none from the prompt on."""
        has_own = await self._has_turn(command, self._num_shared)
        return has_own and not await self._has_turn(command, 0)

    async def _has_turn(self, command: StartRollout, index: int) -> bool:
        return await self._ctx.last(TurnSampled, f"{command.rollout_id}.{index}") is not None

    async def _is_open(self, command: StartRollout) -> bool:
        return await self._ctx.last(RolloutFinished, command.rollout_id) is None


def _branch_commands(command: StartRollout) -> list[StartRollout]:
    """Return the commands of the other rollouts, each on its own."""
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
    """Shares the work queue with its like; a command is done when its rollouts' ends are kept.

    Killed at any moment, it loses nothing: the command is delivered again, and the next worker
    continues from the stored turns.
    """

    role = "rollout_worker"
    consumes: ClassVar[tuple[type[Event], ...]] = (StartRollout,)
    follows: ClassVar[tuple[type[Event], ...]] = (MessageRejected, ReplicaReported)
    tick_s = 1.0

    def __init__(self, chat: ChatFormat, config: RolloutWorkerConfig) -> None:
        """Take the format that the policy was trained with."""
        self.num_concurrent = config.num_concurrent
        self._chat = chat
        self._config = config
        self._slots = Slots(config.num_concurrent)
        self._replicas = ReplicaTable()

    async def on_start_rollout(self, command: StartRollout, ctx: Context) -> Effects:
        """Attempt a task once, or as a tree, as far as that was not done already."""
        return await self._runner(command, ctx).run()

    async def on_message_rejected(self, event: MessageRejected, ctx: Context) -> Effects:
        """Report a command that no worker will carry out as failed: its group must not wait."""
        if event.source_stream != Stream.TASKS:
            return ()
        command = await read_rejected(ctx.store, event, StartRollout)
        if command is None:
            return ()
        runner = self._runner(command, ctx)
        return await runner.abandon(f"rejected: {event.cause}", is_charged=event.is_charged)

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Know whom to ask for tokens."""
        self._replicas.add(event, ctx.monotonic())
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Ask no replica that is silent."""
        self._replicas.expire(ctx.monotonic())
        return ()

    def _runner(self, command: StartRollout, ctx: Context) -> RolloutRunner:
        return RolloutRunner(command, self._chat, self._config, ctx, self._slots, self._replicas)
