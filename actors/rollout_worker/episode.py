"""One episode: a machine, a conversation, and the loop over both.

```
          ┌───────── stored turns first (after a crash, or another machine) ──────────┐
 lease ─▶ │ turn ─▶ TurnSampled stored ─▶ calls run in the machine ─▶ observation ─▶  │ ─▶ changes
          └── machine lost: a copy of the newest saved state, else a fresh machine ───┘
```
A turn counts from the moment it is stored. Any worker that resumes an episode (this one in another
machine, another worker after a crash, a branch) takes the stored turns as they are and never
samples them again. Where a state was saved (`EpisodeSaved`), a copy of that machine resumes from
it, and no call before it runs again; else the stored turns' calls run in a fresh machine.

One attempt at an episode in one machine: plays stored turns there and counts what they cost.

Machines that died under an episode, and whether the policy did it. Pure: no I/O.

A host that says `SandboxKilled` has seen a machine end, by itself, under an operation, while the
host and the other machines on it lived. Once may be chance; the episode goes on in another machine,
on another host where there is one. Twice under the same turn, or twice before the machines that one
episode may have are used up, is the policy's doing. Any other death says nothing about it.

A task of several steps, in one machine: what a step left is stored before the next is laid out.

```
 turn that ends step 0 ─▶ its files as EpisodeStepEnded ─▶ files, setup.sh of step 1 ─▶ next turn
```
The judge grades the stored files in machines of its own when the episode is over, so that no hidden
test comes near the worker.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.rollout_worker.conversation import (
    ContextFullError,
    Conversation,
    GenerationError,
    Journal,
    TurnChargedError,
    channel_of,
    offered_tools,
    sample_turn,
    turn_sampling,
)
from penstock.actors.runtime.context import Context
from penstock.envs.egress.record import EgressRecord
from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.harness.session import CALLS_MAX, ToolSession, tools_called
from penstock.envs.harness.tool_calls import ToolResult
from penstock.envs.sandbox import ImageAbsent, Sandbox, SandboxError, SandboxKilled
from penstock.envs.sandbox_client.client import RemoteSandbox, SandboxBusyError, lease_sandbox
from penstock.envs.tasks.changes import Changes, ChangesError, list_work, read_changes
from penstock.envs.tasks.workspace import (
    SetupError,
    contents_at,
    open_egress,
    open_step,
    open_workspace,
    read_egress,
    states_at,
)
from penstock.kernels.arrays import to_array
from penstock.messages.episode import EpisodeSaved
from penstock.messages.errors import CodecError, DeadlineError
from penstock.messages.file_states import FileState
from penstock.messages.generation import Generate
from penstock.messages.rollout import (
    EgressAttempt,
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    SandboxRecord,
    Trunk,
    Turn,
)
from penstock.messages.task import StartRollout, Task


class EpisodeStats(msgspec.Struct, kw_only=True):
    """Counts of an episode, from its first turn or from a saved state."""

    started_at: float = 0.0
    """Start of the episode, as if it had never been interrupted; monotonic seconds."""
    sandbox: SandboxRecord | None = None
    num_calls: int = 0
    num_invalid_calls: int = 0
    tool_s: float = 0.0
    call_s: list[list[float]] = []
    """Seconds of each call, by turn played."""
    own_s: float = 0.0
    """Seconds that the policy's programs ran: what its time limit counts. Neither sampling nor
    waiting is in it, for a machine, a generator, a host or a processor: turns and tokens bound the
    sampling, and the rest is not the policy's."""
    egress_before: list[EgressAttempt] = []
    """Attempts to reach the network up to where the machine was saved."""
    egress: list[EgressAttempt] = []
    """The same, and those in this machine as far as they were read."""

    @classmethod
    def resumed(
        cls, sandbox: SandboxRecord, saved: EpisodeSaved | None, now: float
    ) -> "EpisodeStats":
        """Return the counts of an episode that begins in a machine, or resumes in it."""
        if saved is None:
            return cls(started_at=now, sandbox=sandbox)
        return cls(
            started_at=now - saved.elapsed_s,
            own_s=saved.own_s,
            sandbox=sandbox,
            num_calls=saved.num_calls,
            num_invalid_calls=saved.num_invalid_calls,
            tool_s=saved.tool_s,
            call_s=list(saved.call_s),
            egress_before=saved.egress,
            egress=saved.egress,
        )

    def add_egress(self, attempts: list[EgressAttempt]) -> None:
        """Add all attempts that this machine has on record."""
        self.egress = EgressRecord([*self.egress_before, *attempts]).lines

    def saved(self, command: StartRollout, conversation: Conversation, now: float) -> EpisodeSaved:
        """Return the counts so far; the caller fills in the checkpoint and its host."""
        return EpisodeSaved(
            rollout_id=command.rollout_id,
            group_id=command.group_id,
            num_turns=len(conversation.turns),
            checkpoint_id="",
            host="",
            observation_ids=to_array(np.array(conversation.observation_ids, np.int32)),
            num_calls=self.num_calls,
            num_invalid_calls=self.num_invalid_calls,
            tool_s=self.tool_s,
            elapsed_s=now - self.started_at,
            own_s=self.own_s,
            call_s=list(self.call_s),
            egress=self.egress,
            starts_segment=conversation.starts_segment,
            is_summary=conversation.is_summary,
            step_ends=list(conversation.step_ends),
        )


class EpisodeRunner:
    """Runs an episode's turns in one machine.

    Args:
        sandbox: The machine.
        conversation: The episode's tokens, up to the turns played in this machine.
        session: The harness over that machine.
        stats: Counts what is played.
        ctx: The worker's context, for the time.

    """

    def __init__(
        self,
        sandbox: RemoteSandbox,
        conversation: Conversation,
        session: ToolSession,
        stats: EpisodeStats,
        ctx: Context,
    ) -> None:
        self.sandbox = sandbox
        self.conversation = conversation
        self._session = session
        self._stats = stats
        self._ctx = ctx

    async def play(self, turn: Turn) -> None:
        """Run a stored turn's calls, and append what they returned to the context.

        Raises:
            SandboxError: The machine failed.
            DeadlineError: It did not answer in time.

        """
        conversation, stats = self.conversation, self._stats
        conversation.append(turn)
        stats.call_s.append([])
        stats.num_calls += len(turn.calls)
        if turn.parse_error:
            stats.num_invalid_calls += 1
        if conversation.end is not None or turn.is_summary:
            return
        if turn.parse_error:
            conversation.observe([f"error: {turn.parse_error}"], is_finished=False)
            return
        if not turn.calls:
            return
        results = await self._call_tools(turn)
        stats.call_s[-1] = self._session.elapsed_s[:CALLS_MAX]
        stats.num_invalid_calls += sum(not result.is_valid for result in results)
        is_finished = any(result.is_finish for result in results)
        conversation.observe([result.text for result in results], is_finished=is_finished)

    async def _call_tools(self, turn: Turn) -> Sequence[ToolResult]:
        started_at, guest_s = self._ctx.monotonic(), self.sandbox.guest_s
        results = await self._session.run(turn.calls, self._ctx.monotonic)
        elapsed_s = self._ctx.monotonic() - started_at
        self._stats.tool_s += elapsed_s
        self._stats.own_s += min(elapsed_s, self.sandbox.guest_s - guest_s)
        return results


KILLS_MAX = 2
"""Machines that a policy may kill under one turn before the episode is its failure."""


class MachineDeaths:
    """Deaths under one episode."""

    def __init__(self) -> None:
        self._kills: Counter[int] = Counter()
        """Turn -> machines that it killed."""
        self.num_kills = 0
        """Machines killed, over all turns."""
        self.turn = -1
        """Turn whose calls run, or whose files are read; -1 before any of the policy's."""
        self.avoid_host = ""
        """Host of the machine killed last: the next one should be on another."""

    def add_kill(self, host: str, *, is_copy: bool) -> None:
        """Count a machine that ended under the policy's own turn.

        A copy of a saved machine runs where that was: its death is no second one elsewhere.
        """
        if self.turn >= 0:
            self.num_kills += 1
            self._kills[self.turn] += not (is_copy and self._kills[self.turn])
            self.avoid_host = host

    @property
    def is_policys(self) -> bool:
        """Whether one turn has killed machine after machine."""
        return max(self._kills.values(), default=0) >= KILLS_MAX


async def read_left(
    sandbox: Sandbox,
    task: Task,
    step: int,
    config: RolloutWorkerConfig,
    layer: Mapping[bytes, FileState],
) -> Changes:
    """Return what an episode changed by the end of a step; raises as `read_changes` does."""
    return await read_changes(
        sandbox,
        contents_at(task, step),
        num_files_max=config.num_files_max,
        num_bytes_max=config.files_bytes_max,
        states=states_at(task, step),
        has_layer=bool(task.image),
        layer=layer,
    )


async def open_next_step(
    runner: EpisodeRunner,
    task: Task,
    config: RolloutWorkerConfig,
    journal: Journal,
    layer: Mapping[bytes, FileState],
) -> None:
    """Store what the step that has just ended left, once, and lay out the next one.

    Raises:
        ChangesError: What it left cannot be carried over.
        SetupError: The next one cannot be laid out on it.
        SandboxError: The machine failed.

    """
    turn_index = runner.conversation.step_ends[-1]
    step = len(runner.conversation.step_ends) - 1
    if not await journal.has_step_end(turn_index):
        left = await read_left(runner.sandbox, task, step, config, layer)
        await journal.end_step(step, turn_index, left)
    await open_step(runner.sandbox, task.steps[step])


class Episode:
    """Carries out one rollout.

    Args:
        command: The rollout's own; `RolloutRunner` handles its branches.
        chat: Format of the policy.
        config: Bounds.
        ctx: The worker's.
        replicas: Of generators, as the worker sees them.
        trunk: Where it branches off, if it does.
        fork_at: Save the state after so many turns, for others to branch off; 0 for none.

    """

    def __init__(  # noqa: PLR0913 - the two last are a tree's
        self,
        command: StartRollout,
        chat: ChatFormat,
        config: RolloutWorkerConfig,
        ctx: Context,
        replicas: ReplicaTable,
        *,
        trunk: Trunk | None = None,
        fork_at: int = 0,
    ) -> None:
        self._command = command
        self._chat = chat
        self._config = config
        self._ctx = ctx
        self._replicas = replicas
        self._trunk = trunk
        self._fork_at = fork_at
        self._journal = Journal(ctx, command, trunk)
        self._turns: list[Turn] = []
        """Those stored."""
        self._stats = EpisodeStats()
        self._deaths = MachineDeaths()
        self._layer: dict[bytes, FileState] = {}
        """Files of the image layer, listed in a fresh machine: a copy mixes them with changes."""
        self.forked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it continued after `fork_at` turns; set at its end at the latest."""

    async def run(self) -> RolloutFinished:
        """Run to a typed end; only errors of the bus itself are raised."""
        try:
            self._turns = await self._journal.turns()
            return await self._in_machines()
        except CodecError as error:  # A turn in the log or the store is none.
            return self._finished(EpisodeEnd.INFRASTRUCTURE_ERROR, Changes(), str(error))
        finally:
            self._set_forked(continued=False)

    async def abandon(self, cause: str, *, is_charged: bool) -> RolloutFinished:
        """Report an episode that no worker will continue as failed.

        One that is at fault itself and has sampled something is the policy's failure: else
        whatever breaks a worker would be a way to have bad episodes masked.
        """
        with contextlib.suppress(CodecError):
            self._turns = await self._journal.turns()
        saved = await self._journal.newest_saved(len(self._turns), above=0)
        self._stats.egress = saved.egress if saved else []
        is_policys = is_charged and self._turns
        end = EpisodeEnd.POLICY_ERROR if is_policys else EpisodeEnd.INFRASTRUCTURE_ERROR
        return self._finished(end, Changes(), cause)

    async def _in_machines(self) -> RolloutFinished:
        """Try some machines; a saved state that failed once is not tried again.

        The first ends the machine of a worker that had the episode before: a dead one's would be
        leased for long, and keep others out of a full host. Should it live, it takes another one.
        """
        error, tried, deaths = "", 0, self._deaths
        for num_tried in range(self._config.num_machines_max + KILLS_MAX):
            if num_tried >= self._config.num_machines_max and not deaths.num_kills:
                break
            saved = await self._journal.newest_saved(len(self._turns), above=tried)
            tried = saved.num_turns if saved else tried
            lease_id = self._ctx.new_id("lease")
            spec = self._config.lease_spec(
                self._command, saved, takes_over=num_tried == 0, avoid_host=deaths.avoid_host
            )
            try:
                async with lease_sandbox(self._ctx, lease_id, spec) as sandbox:
                    return await self._run_or_lose(sandbox, saved)
            except (TurnChargedError, ChangesError, SetupError) as failure:
                return self._finished(EpisodeEnd.POLICY_ERROR, Changes(), str(failure))
            except (GenerationError, ImageAbsent) as failure:
                error = str(failure)
                break
            except SandboxBusyError as failure:
                error = str(failure)
                if saved is None:
                    break
            except (SandboxError, DeadlineError) as failure:
                error = str(failure)
                if deaths.is_policys:
                    break
        end = EpisodeEnd.INFRASTRUCTURE_ERROR
        if deaths.num_kills >= KILLS_MAX:
            end, error = EpisodeEnd.POLICY_ERROR, f"{deaths.num_kills} machines killed: {error}"
        return self._finished(end, Changes(), error)

    async def _run_or_lose(
        self, sandbox: RemoteSandbox, saved: EpisodeSaved | None
    ) -> RolloutFinished:
        """Run in one machine; if it is lost, its host may still report what it tried."""
        lost = self._stats.egress
        self._stats = EpisodeStats.resumed(sandbox.info, saved, self._ctx.monotonic())
        if lost:  # It has all that was saved meanwhile, and more.
            self._stats.egress_before = self._stats.egress = lost
        try:
            return await self._run_in(sandbox, saved)
        except SandboxError as error:
            if isinstance(error, SandboxKilled):
                self._deaths.add_kill(sandbox.host, is_copy=saved is not None)
            with contextlib.suppress(SandboxError, DeadlineError):
                self._stats.add_egress(await read_egress(sandbox, self._command.task))
            raise

    async def _run_in(self, sandbox: RemoteSandbox, saved: EpisodeSaved | None) -> RolloutFinished:
        """Go through the turns, from the beginning or from a saved state; stored ones first."""
        self._deaths.turn = -1
        runner = await self._open(sandbox, saved)
        conversation = runner.conversation
        if saved is not None and saved.num_turns >= self._fork_at:
            self._set_forked(continued=True)
        while conversation.end is None or len(conversation.turns) < len(self._turns):
            num_played = len(conversation.turns)
            if num_played == len(self._turns):
                if self._stats.own_s > self._command.task.limits.wall_s_max:
                    return await self._leave(runner, EpisodeEnd.TIME_LIMIT)
                try:
                    turn = await self._sample(conversation, num_played)
                except ContextFullError:
                    return await self._leave(runner, EpisodeEnd.TOKEN_LIMIT)
                self._turns += await self._journal.add(num_played, turn)
            self._deaths.turn = num_played
            num_ended = len(conversation.step_ends)
            await runner.play(self._turns[num_played])
            if len(conversation.step_ends) > num_ended:
                task, config = self._command.task, self._config
                await open_next_step(runner, task, config, self._journal, self._layer)
            await self._save_if_due(runner)
        return await self._leave(runner, conversation.end)

    async def _open(self, sandbox: RemoteSandbox, saved: EpisodeSaved | None) -> EpisodeRunner:
        """Give a fresh machine its files; of a copy take up the conversation."""
        command, task = self._command, self._command.task
        conversation = Conversation(
            self._chat,
            task,
            offered_tools(command.harness),
            ends_on_parse_error=self._config.ends_on_parse_error,
            summary=self._config.summary,
        )
        session = ToolSession(
            command.harness, sandbox, task.limits, sleep_s=task.call_sleep_s, pages=task.pages
        )
        if saved is None:
            first = self._trunk.rollout_id if self._trunk else command.rollout_id
            has_git = command.harness != HARNESS_VERSION
            self._layer = await list_work(sandbox) if task.image else {}
            await open_workspace(sandbox, task, first, has_git=has_git)
        else:
            await open_egress(sandbox, task)
            conversation.resume(self._turns[: saved.num_turns], saved)
            session.resume(conversation.turns)
        return EpisodeRunner(sandbox, conversation, session, self._stats, self._ctx)

    async def _sample(self, conversation: Conversation, index: int) -> Turn:
        command = self._command
        is_first = index == self._journal.num_trunk_turns
        request = Generate(
            request_id=self._ctx.new_id(f"{command.rollout_id}.{index}"),
            session_id=command.rollout_id,
            purpose=command.purpose,
            channel=channel_of(command),
            token_ids=to_array(np.array(conversation.token_ids, np.int32)),
            sampling=turn_sampling(
                command.sampling, index, conversation.num_tokens_next_max, self._chat.stop_ids
            ),
            routes_from=0 if is_first else conversation.routes_from,
        )
        sampled = await sample_turn(
            self._ctx,
            self._replicas,
            request,
            self._config.retry,
            idle_s=self._config.generate_idle_s,
        )
        return conversation.make_turn(sampled, request.sampling)

    async def _save_if_due(self, runner: EpisodeRunner) -> None:
        """Save the state after a turn where the settings or the tree ask for it."""
        count = len(runner.conversation.turns)
        continues = runner.conversation.end is None or count < len(self._turns)
        if not continues or count <= self._journal.num_trunk_turns:
            return
        is_fork = count == self._fork_at
        is_due = is_fork or self._config.is_save_due(count)
        if is_due and await self._journal.saved_after(count) is None:
            await self._save(runner, count)
        if is_fork:
            self._set_forked(continued=True)

    async def _save(self, runner: EpisodeRunner, num_turns: int) -> None:
        """Save the machine and publish that; an episode that cannot be saved continues without."""
        checkpoint_id = self._ctx.new_id(f"{self._command.rollout_id}-{num_turns}")
        try:
            saved = await runner.sandbox.save(checkpoint_id)
            self._stats.add_egress(await read_egress(runner.sandbox, self._command.task))
        except SandboxError:
            self._ctx.set_gauge("unsaved_turns", num_turns)
            return
        event = self._stats.saved(self._command, runner.conversation, self._ctx.monotonic())
        event = msgspec.structs.replace(event, checkpoint_id=saved.checkpoint_id, host=saved.host)
        await self._ctx.publish(event)

    async def _leave(self, runner: EpisodeRunner, end: EpisodeEnd) -> RolloutFinished:
        """Read what the episode changed, and return its end."""
        task, step = self._command.task, len(runner.conversation.step_ends)
        self._stats.add_egress(await read_egress(runner.sandbox, task))
        left = await read_left(runner.sandbox, task, step, self._config, self._layer)
        return self._finished(end, left, step_ends=runner.conversation.step_ends)

    def _finished(
        self, end: EpisodeEnd, changes: Changes, error: str = "", *, step_ends: Sequence[int] = ()
    ) -> RolloutFinished:
        command, stats = self._command, self._stats
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
            files=EpisodeFiles(changed=changes.files, states=changes.states),
            deleted=changes.deleted,
            sandbox=stats.sandbox,
            num_calls=stats.num_calls,
            num_invalid_calls=stats.num_invalid_calls,
            wall_s=self._ctx.monotonic() - stats.started_at if stats.sandbox else 0.0,
            tool_s=stats.tool_s,
            error=error,
            egress=stats.egress,
            trunk=self._trunk,
            tool_names=[tools_called(turn.calls) for turn in self._turns],
            call_s=stats.call_s,
            step_ends=list(step_ends),
        )

    def _set_forked(self, *, continued: bool) -> None:
        if not self.forked.done():
            self.forked.set_result(continued)
