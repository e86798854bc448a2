"""One episode: a machine, a conversation, and the loop over both.

```
          ┌───────── stored turns first (after a crash, or another machine) ──────────┐
 lease ─▶ │ turn ─▶ TurnSampled stored ─▶ calls run in the machine ─▶ observation ─▶  │ ─▶ changes
          └───────── machine lost: a fresh one, from the stored turns ────────────────┘
```
A turn counts from the moment it is stored. Whoever carries an episode on (this worker in another
machine, another worker after a crash) takes the stored turns as they are and runs their calls
again; it never samples them again.
"""

from collections.abc import Sequence

import msgspec

from penstock.actors.policy.tokenizer import Tokenizer
from penstock.actors.rollout_worker.changes import Changes, ChangesError, read_changes
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.rollout_worker.conversation import Conversation, int32_array
from penstock.actors.rollout_worker.sampling import (
    GenerationError,
    RetryPolicy,
    sample_turn,
    turn_sampling,
)
from penstock.actors.runtime.context import Context
from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.harness.result import ToolResult
from penstock.envs.harness.versions import Tools, open_tools
from penstock.envs.harness.wording import tools_prompt
from penstock.envs.remote import LeaseTerms, SandboxBusyError, lease_sandbox
from penstock.envs.sandbox import Sandbox, SandboxError
from penstock.envs.tasks.workspace import open_workspace, read_egress
from penstock.messages.errors import DeadlineError
from penstock.messages.generation import Generate
from penstock.messages.rollout import (
    EgressAttempt,
    EpisodeEnd,
    RolloutFinished,
    SandboxRecord,
    Turn,
    TurnSampled,
)
from penstock.messages.task import StartRollout


class Tally(msgspec.Struct):
    """What one machine's attempt at the episode came to."""

    started_at: float = 0.0
    sandbox: SandboxRecord | None = None
    num_calls: int = 0
    num_invalid_calls: int = 0
    tool_s: float = 0.0
    lost_s: float = 0.0
    """Time that generators were away: none of the policy's."""
    egress: list[EgressAttempt] = []
    """What programs tried to reach outside."""


class Episode:
    """Carries out one `StartRollout`."""

    def __init__(
        self,
        command: StartRollout,
        tokenizer: Tokenizer,
        config: RolloutWorkerConfig,
        ctx: Context,
    ) -> None:
        """Prepare; nothing is asked of anyone yet."""
        self._command = command
        self._tokenizer = tokenizer
        self._config = config
        self._ctx = ctx
        self._turns: list[Turn] = []
        """Those stored."""
        self._tally = Tally()

    async def run(self) -> RolloutFinished:
        """Run to a typed end; only errors of the bus itself are raised."""
        self._turns = await self._stored_turns(0)
        error = ""
        for _ in range(self._config.num_machines_max):
            lease_id = self._ctx.new_id("lease")
            try:
                async with lease_sandbox(self._ctx, lease_id, self._terms()) as sandbox:
                    return await self._run_in(sandbox)
            except (GenerationError, SandboxBusyError) as failure:
                error = str(failure)
                break
            except (SandboxError, DeadlineError) as failure:
                error = str(failure)
        return self._finished(EpisodeEnd.INFRASTRUCTURE_ERROR, Changes(), error)

    async def abandon(self, cause: str) -> RolloutFinished:
        """Close the account of an episode that nobody will carry on."""
        self._turns = await self._stored_turns(0)
        return self._finished(EpisodeEnd.INFRASTRUCTURE_ERROR, Changes(), cause)

    async def _run_in(self, sandbox: Sandbox) -> RolloutFinished:
        """Run in one machine from the beginning, stored turns first."""
        self._tally = Tally(started_at=self._ctx.monotonic(), sandbox=sandbox.info)
        task = self._command.task
        harness = self._command.harness
        has_git = harness != HARNESS_VERSION
        await open_workspace(sandbox, task, self._command.rollout_id, has_git=has_git)
        tools = open_tools(harness, sandbox, task.limits)
        conversation = Conversation(
            self._tokenizer,
            task,
            tools=tools_prompt(harness),
            ends_on_parse_error=self._config.ends_on_parse_error,
        )
        while conversation.end is None or len(conversation.turns) < len(self._turns):
            num_played = len(conversation.turns)
            if num_played == len(self._turns):
                if self._is_late():
                    return await self._leave(sandbox, EpisodeEnd.TIME_LIMIT)
                self._turns += await self._next_turns(conversation)
            await self._play(tools, conversation, self._turns[num_played])
        return await self._leave(sandbox, conversation.end)

    async def _next_turns(self, conversation: Conversation) -> list[Turn]:
        """Sample and store one turn; if another incarnation stored it first, take its turns."""
        index = len(conversation.turns)
        turn = await self._sample(conversation, index)
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
        return await self._stored_turns(index) if receipt.is_duplicate else [turn]

    async def _sample(self, conversation: Conversation, index: int) -> Turn:
        command, config = self._command, self._config
        request = Generate(
            request_id=self._ctx.new_id(f"{command.rollout_id}.{index}"),
            session_id=command.rollout_id,
            purpose=command.purpose,
            token_ids=int32_array(conversation.token_ids),
            sampling=turn_sampling(
                command.sampling, index, conversation.num_tokens_next_max, self._tokenizer.end_id
            ),
            routes_from=conversation.routes_from,
        )
        retry = RetryPolicy(
            idle_s=config.generate_idle_s,
            wait_s=config.generate_wait_s,
            delay_s=config.retry_delay_s,
            delay_s_max=config.retry_delay_s_max,
        )
        sampled, lost_s = await sample_turn(self._ctx, request, retry)
        self._tally.lost_s += lost_s
        return conversation.make_turn(sampled)

    async def _play(self, tools: Tools, conversation: Conversation, turn: Turn) -> None:
        """Take a stored turn: run its calls, and let the policy see what they returned."""
        conversation.append(turn)
        self._tally.num_calls += len(turn.calls)
        if turn.parse_error:
            self._tally.num_invalid_calls += 1
        if conversation.end is not None:
            return
        if turn.parse_error:
            conversation.observe([f"error: {turn.parse_error}"], is_finished=False)
            return
        results = await self._call_tools(tools, turn)
        self._tally.num_invalid_calls += sum(not result.is_valid for result in results)
        is_finished = any(result.is_finish for result in results)
        conversation.observe([result.text for result in results], is_finished=is_finished)

    async def _call_tools(self, tools: Tools, turn: Turn) -> Sequence[ToolResult]:
        started_at = self._ctx.monotonic()
        results = await tools(turn.calls)
        self._tally.tool_s += self._ctx.monotonic() - started_at
        return results

    async def _leave(self, sandbox: Sandbox, end: EpisodeEnd) -> RolloutFinished:
        """Read what the episode changed, and close its account."""
        config = self._config
        self._tally.egress = await read_egress(sandbox, self._command.task)
        try:
            changes = await read_changes(
                sandbox,
                self._command.task.files,
                num_files_max=config.num_files_max,
                num_bytes_max=config.files_bytes_max,
            )
        except ChangesError as error:
            return self._finished(EpisodeEnd.POLICY_ERROR, Changes(), str(error))
        return self._finished(end, changes)

    def _finished(self, end: EpisodeEnd, changes: Changes, error: str = "") -> RolloutFinished:
        command, tally = self._command, self._tally
        return RolloutFinished(
            rollout_id=command.rollout_id,
            group_id=command.group_id,
            group_index=command.group_index,
            group_size=command.group_size,
            member=command.member,
            purpose=command.purpose,
            task_id=command.task.task_id,
            rung=command.task.rung,
            end=end,
            turns=self._turns,
            files=changes.files,
            deleted=changes.deleted,
            sandbox=tally.sandbox,
            num_calls=tally.num_calls,
            num_invalid_calls=tally.num_invalid_calls,
            wall_s=self._ctx.monotonic() - tally.started_at if tally.sandbox else 0.0,
            tool_s=tally.tool_s,
            error=error,
            egress=tally.egress,
        )

    async def _stored_turns(self, first: int) -> list[Turn]:
        """Read the stored turns from an index on, as far as they go."""
        turns: list[Turn] = []
        for index in range(first, self._command.task.limits.num_turns_max):
            event = await self._ctx.last(TurnSampled, f"{self._command.rollout_id}.{index}")
            if event is None:
                break
            turns.append(event.turn)
        return turns

    def _is_late(self) -> bool:
        """Tell whether the episode's own time is up."""
        elapsed_s = self._ctx.monotonic() - self._tally.started_at - self._tally.lost_s
        return elapsed_s > self._command.task.limits.wall_s_max

    def _terms(self) -> LeaseTerms:
        config = self._config
        return LeaseTerms(
            holder=self._command.rollout_id,
            lease_s=config.lease_s,
            acquire_wait_s=config.acquire_wait_s,
            retry_delay_s=config.retry_delay_s,
        )
