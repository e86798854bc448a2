"""A machine and the conversation about it: plays turns that are stored."""

from collections.abc import Sequence

from penstock.actors.rollout_worker.conversation import Conversation
from penstock.actors.rollout_worker.episode_stats import Tally
from penstock.actors.runtime.context import Context
from penstock.envs.harness.result import ToolResult
from penstock.envs.harness.versions import Tools
from penstock.envs.remote.sandbox import RemoteSandbox
from penstock.messages.rollout import Turn


class Stage:
    """Where one attempt at an episode takes place.

    Args:
        sandbox: Its machine.
        conversation: As far as it was played there.
        tools: Of that machine.
        tally: Counts what is played.
        ctx: For the time.

    """

    def __init__(
        self,
        sandbox: RemoteSandbox,
        conversation: Conversation,
        tools: Tools,
        tally: Tally,
        ctx: Context,
    ) -> None:
        self.sandbox = sandbox
        self.conversation = conversation
        self._tools = tools
        self._tally = tally
        self._ctx = ctx

    async def play(self, turn: Turn) -> None:
        """Take a stored turn: run its calls, and let the policy see what they returned.

        Raises:
            SandboxError: The machine failed.
            DeadlineError: It did not answer in time.

        """
        conversation, tally = self.conversation, self._tally
        conversation.append(turn)
        tally.num_calls += len(turn.calls)
        if turn.parse_error:
            tally.num_invalid_calls += 1
        if conversation.end is not None:
            return
        if turn.parse_error:
            conversation.observe([f"error: {turn.parse_error}"], is_finished=False)
            return
        results = await self._call_tools(turn)
        tally.num_invalid_calls += sum(not result.is_valid for result in results)
        is_finished = any(result.is_finish for result in results)
        conversation.observe([result.text for result in results], is_finished=is_finished)

    async def _call_tools(self, turn: Turn) -> Sequence[ToolResult]:
        started_at = self._ctx.monotonic()
        results = await self._tools(turn.calls)
        self._tally.tool_s += self._ctx.monotonic() - started_at
        return results
