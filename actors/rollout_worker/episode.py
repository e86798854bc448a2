"""One episode: a machine, a conversation, and the loop over both.

```
          ┌───────── stored turns first (after a crash, or another machine) ──────────┐
 lease ─▶ │ turn ─▶ TurnSampled stored ─▶ calls run in the machine ─▶ observation ─▶  │ ─▶ changes
          └── machine lost: a copy of the newest saved state, else a fresh machine ───┘
```
A turn counts from the moment it is stored. Whoever resumes an episode (the same worker in another
machine, another worker after a crash, a branch) takes the stored turns as they are and never
samples them again. A copy of a saved machine (`EpisodeSaved`) resumes after its turns; without
one, the calls of all stored turns run again in a fresh machine.

`SandboxKilled` means that a machine ended by itself during an operation, while its host and the
host's other machines lived. One such death may be a coincidence: the episode continues in another
machine, if possible on another host. Two of them under the same turn, or within all machines that
the episode may use, are the policy's doing. Other deaths say nothing about the policy.

A task of several steps runs in one machine. The files of a step are stored before the next begins:

```
 turn that ends step 0 ─▶ its files as EpisodeStepEnded ─▶ files, setup.sh of step 1 ─▶ next turn
```
The judge grades the stored files in its own machines, so no hidden test reaches the worker.
"""

import asyncio
import contextlib
import logging
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
from penstock.messages.task import FileState, StartRollout, Task

log = logging.getLogger(__name__)


class EpisodeStats(msgspec.Struct, kw_only=True):
    """Counts of an episode, from its first turn or from a saved state."""

    started_at: float = 0.0
    """Monotonic start of the episode in seconds, without interruptions."""
    sandbox: SandboxRecord | None = None
    num_calls: int = 0
    num_invalid_calls: int = 0
    tool_s: float = 0.0
    call_s: list[list[float]] = []
    """Seconds of each call, by turn."""
    guest_s: float = 0.0
    """Seconds that the policy's programs ran, which its time limit counts. Sampling (bounded by
    turns and tokens) and waiting for machines, generators, hosts or CPUs do not count."""
    egress_before: list[EgressAttempt] = []
    """Network attempts before the machine was saved."""
    egress: list[EgressAttempt] = []
    """All network attempts, including those read from this machine."""

    @classmethod
    def resumed(
        cls, sandbox: SandboxRecord, saved: EpisodeSaved | None, now: float
    ) -> "EpisodeStats":
        """Return the counts of an episode that begins or resumes in a machine."""
        if saved is None:
            return cls(started_at=now, sandbox=sandbox)
        return cls(
            started_at=now - saved.elapsed_s,
            guest_s=saved.own_s,
            sandbox=sandbox,
            num_calls=saved.num_calls,
            num_invalid_calls=saved.num_invalid_calls,
            tool_s=saved.tool_s,
            call_s=list(saved.call_s),
            egress_before=saved.egress,
            egress=saved.egress,
        )

    def add_egress(self, attempts: list[EgressAttempt]) -> None:
        """Set the network attempts of this machine."""
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
            own_s=self.guest_s,
            call_s=list(self.call_s),
            egress=self.egress,
            starts_segment=conversation.starts_segment,
            is_summary=conversation.is_summary,
            step_ends=list(conversation.step_ends),
        )


class EpisodeRunner:
    """Runs an episode's turns in one machine."""

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
        """Run a stored turn's calls and append their results to the context.

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
        self._stats.guest_s += min(elapsed_s, self.sandbox.guest_s - guest_s)
        return results


KILLS_MAX = 2
"""Machines that may die under one turn before the episode is the policy's failure."""


class MachineDeaths:
    """Machines that died under one episode, and whether the policy killed them."""

    def __init__(self) -> None:
        self._kills: Counter[int] = Counter()
        """Machines killed by turn."""
        self.num_kills = 0
        self.turn = -1
        """Turn whose calls run or whose files are read; -1 before the policy's first."""
        self.avoid_host = ""
        """Host of the machine that died last; the next machine should be elsewhere."""

    def add_kill(self, host: str, *, is_copy: bool) -> None:
        """Count a machine that ended by itself under a turn of the policy."""
        if self.turn >= 0:
            self.num_kills += 1
            # A copy runs on the host of the saved machine: no second host confirms the death.
            self._kills[self.turn] += not (is_copy and self._kills[self.turn])
            self.avoid_host = host

    @property
    def is_repeated(self) -> bool:
        """Whether one turn killed `KILLS_MAX` machines."""
        return max(self._kills.values(), default=0) >= KILLS_MAX


async def read_step_changes(
    sandbox: Sandbox,
    task: Task,
    step: int,
    config: RolloutWorkerConfig,
    layer: Mapping[bytes, FileState],
) -> Changes:
    """Return the changes up to the end of a step; raises what `read_changes` raises."""
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
    """Store the files of the step that just ended, and set up the next step.

    Raises:
        ChangesError: The step's files exceed the limits.
        SetupError: The next step cannot be set up on them.
        SandboxError: The machine failed.

    """
    turn_index = runner.conversation.step_ends[-1]
    step = len(runner.conversation.step_ends) - 1
    if not await journal.has_step_end(turn_index):
        left = await read_step_changes(runner.sandbox, task, step, config, layer)
        await journal.end_step(step, turn_index, left)
    await open_step(runner.sandbox, task.steps[step])


class Episode:
    """Runs one rollout.

    Args:
        command: Command of this rollout; `RolloutRunner` handles branches.
        trunk: Trunk that this rollout branches off, if any.
        fork_at: Number of turns after which to save the state for branches; 0 for none.

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
        """Stored turns."""
        self._stats = EpisodeStats()
        self._deaths = MachineDeaths()
        self._layer: dict[bytes, FileState] = {}
        """Files of the image layer, listed in a fresh machine: a copy mixes them with changes."""
        self.forked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the episode continued after `fork_at` turns; set at its end at the latest."""

    async def run(self) -> RolloutFinished:
        """Run to a typed end; raises only errors of the bus."""
        rollout_id = self._command.rollout_id
        try:
            self._turns = await self._journal.turns()
            if self._turns:
                log.info("rollout %s: resuming after %d turns", rollout_id, len(self._turns))
            finished = await self._in_machines()
        except CodecError as error:  # A stored turn is damaged.
            finished = self._finished(EpisodeEnd.INFRASTRUCTURE_ERROR, Changes(), str(error))
        finally:
            # Even if the bus failed: branches wait for it while they hold no slot.
            self._set_forked(continued=False)
        is_failed = finished.end is EpisodeEnd.INFRASTRUCTURE_ERROR
        log.log(
            logging.WARNING if is_failed else logging.INFO,
            "rollout %s: %s after %d turns and %.1f s %s",
            *(rollout_id, finished.end, len(finished.turns), finished.wall_s, finished.error),
        )
        return finished

    async def abandon(self, cause: str, *, is_charged: bool) -> RolloutFinished:
        """Report an episode that no worker will continue as failed."""
        with contextlib.suppress(CodecError):
            self._turns = await self._journal.turns()
        saved = await self._journal.newest_saved(len(self._turns), above=0)
        self._stats.egress = saved.egress if saved else []
        # A policy that breaks workers must not get its bad episodes masked.
        is_at_fault = is_charged and self._turns
        end = EpisodeEnd.POLICY_ERROR if is_at_fault else EpisodeEnd.INFRASTRUCTURE_ERROR
        return self._finished(end, Changes(), cause)

    async def _in_machines(self) -> RolloutFinished:
        error, tried, deaths = "", 0, self._deaths
        for num_tried in range(self._config.num_machines_max + KILLS_MAX):
            # More machines than the limit only to decide whether the policy kills them.
            if num_tried >= self._config.num_machines_max and not deaths.num_kills:
                break
            saved = await self._journal.newest_saved(len(self._turns), above=tried)
            tried = saved.num_turns if saved else tried  # A state that failed is not tried again.
            lease_id = self._ctx.new_id("lease")
            # The first lease takes over from a dead worker, whose machine would stay leased and
            # fill its host. If that worker lives, its episode continues in another machine.
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
                log.warning("rollout %s: machine %s: %s", self._command.rollout_id, lease_id, error)
                if deaths.is_repeated:
                    break
        end = EpisodeEnd.INFRASTRUCTURE_ERROR
        if deaths.num_kills >= KILLS_MAX:
            end, error = EpisodeEnd.POLICY_ERROR, f"{deaths.num_kills} machines killed: {error}"
        return self._finished(end, Changes(), error)

    async def _run_or_lose(
        self, sandbox: RemoteSandbox, saved: EpisodeSaved | None
    ) -> RolloutFinished:
        lost = self._stats.egress
        self._stats = EpisodeStats.resumed(sandbox.info, saved, self._ctx.monotonic())
        if lost:  # A superset of the attempts in the saved state.
            self._stats.egress_before = self._stats.egress = lost
        try:
            return await self._run_in(sandbox, saved)
        except SandboxError as error:
            if isinstance(error, SandboxKilled):
                self._deaths.add_kill(sandbox.host, is_copy=saved is not None)
            # The host's proxy may still have the lost machine's attempts.
            with contextlib.suppress(SandboxError, DeadlineError):
                self._stats.add_egress(await read_egress(sandbox, self._command.task))
            raise

    async def _run_in(self, sandbox: RemoteSandbox, saved: EpisodeSaved | None) -> RolloutFinished:
        self._deaths.turn = -1
        runner = await self._open(sandbox, saved)
        conversation = runner.conversation
        if saved is not None and saved.num_turns >= self._fork_at:
            self._set_forked(continued=True)
        while conversation.end is None or len(conversation.turns) < len(self._turns):
            num_played = len(conversation.turns)
            if num_played == len(self._turns):
                if self._stats.guest_s > self._command.task.limits.wall_s_max:
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
        checkpoint_id = self._ctx.new_id(f"{self._command.rollout_id}-{num_turns}")
        try:
            saved = await runner.sandbox.save(checkpoint_id)
            self._stats.add_egress(await read_egress(runner.sandbox, self._command.task))
        except SandboxError as error:  # The episode can go on; a crash costs it more.
            log.warning("rollout %s: not saved: %s", self._command.rollout_id, error)
            self._ctx.set_gauge("unsaved_turns", num_turns)
            return
        event = self._stats.saved(self._command, runner.conversation, self._ctx.monotonic())
        event = msgspec.structs.replace(event, checkpoint_id=saved.checkpoint_id, host=saved.host)
        await self._ctx.publish(event)

    async def _leave(self, runner: EpisodeRunner, end: EpisodeEnd) -> RolloutFinished:
        task, step = self._command.task, len(runner.conversation.step_ends)
        self._stats.add_egress(await read_egress(runner.sandbox, task))
        left = await read_step_changes(runner.sandbox, task, step, self._config, self._layer)
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
