"""One attempt at an episode in one machine: plays stored turns there and counts what they cost."""

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.actors.rollout_worker.conversation import Conversation
from penstock.actors.runtime.context import Context
from penstock.envs.egress.record import EgressRecord
from penstock.envs.harness.session import CALLS_MAX, Session
from penstock.envs.harness.tool_calls import ToolResult
from penstock.envs.sandbox_client.remote_sandbox import RemoteSandbox
from penstock.kernels.arrays import to_array
from penstock.messages.episode import EpisodeSaved
from penstock.messages.rollout import EgressAttempt, SandboxRecord, Turn
from penstock.messages.task import StartRollout


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
        session: Session,
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
