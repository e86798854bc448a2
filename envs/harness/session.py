"""One episode's tools of version 2: typed arguments, a terminal that remembers, search, lints.

```
 calls of a turn ─▶ check ─▶ all at once, but for writes to one path and commands of the terminal
```
The same session runs in training, over a microVM, and in production, over a checkout: what a tool
says depends on the files, the commands and nothing else.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from penstock.envs.harness.arguments import checked_arguments
from penstock.envs.harness.jobs import Jobs
from penstock.envs.harness.lints import Lints
from penstock.envs.harness.paths import checked_path
from penstock.envs.harness.registry import CALLS_MAX, FINISH
from penstock.envs.harness.result import InvalidCallError, ToolResult, bounded
from penstock.envs.harness.retrieval.index import CodeSearch, Embedder
from penstock.envs.harness.run import in_parallel
from penstock.envs.harness.shell import Shell
from penstock.envs.harness.tools import TOOLS_2, Tool2
from penstock.envs.sandbox import Sandbox
from penstock.messages.errors import DeadlineError
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

_GRACE_S = 5.0
_TERMINAL = "the terminal"


class Session:
    """The tools of one episode.

    Args:
        sandbox: Where they work.
        limits: Of the task: seconds of a call, bytes of an observation.
        embedder: For semantic search; without one it goes by words alone.

    Example:
        session = Session(machine, task.limits)
        results = await session.run([ToolCall(name="glob", arguments={"pattern": "*.py"})])

    """

    def __init__(self, sandbox: Sandbox, limits: Limits, embedder: Embedder | None = None) -> None:
        self.sandbox, self.limits = sandbox, limits
        self.shell = Shell(sandbox, limits)
        self.jobs = Jobs(sandbox, limits)
        self.lints = Lints(sandbox, limits)
        self.search = CodeSearch(sandbox, embedder)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Carry out the calls of one turn; a wrong call is an outcome, not an error.

        Raises:
            SandboxError: The machine failed; no result of this turn is to be used.
            DeadlineError: The machine did not answer in time.

        """
        return await in_parallel(self._call(call, index) for index, call in enumerate(calls))

    async def _call(self, call: ToolCall, index: int) -> ToolResult:
        try:
            tool, arguments = self._checked(call, index)
            text = await self._within_time(call.name, tool, arguments)
        except InvalidCallError as error:
            words = bounded(f"error: {error}", self.limits.output_bytes_max)
            return ToolResult(name=call.name, text=words, is_valid=False)
        text = bounded(text, self.limits.output_bytes_max)
        return ToolResult(name=call.name, text=text, is_finish=call.name == FINISH)

    def _checked(self, call: ToolCall, index: int) -> tuple[Tool2, dict[str, Any]]:
        if index >= CALLS_MAX:
            raise InvalidCallError(f"at most {CALLS_MAX} calls a turn")
        tool = TOOLS_2.get(call.name)
        if tool is None:
            raise InvalidCallError(f"no tool {call.name}; there are {', '.join(TOOLS_2)}")
        return tool, checked_arguments(call.name, tool.arguments, call.arguments)

    async def _within_time(self, name: str, tool: Tool2, arguments: dict[str, Any]) -> str:
        deadline_s = self.limits.tool_s_max + _GRACE_S
        async with self._lock(tool, arguments):
            try:
                async with asyncio.timeout(deadline_s):
                    return await tool.run(self, arguments)
            except DeadlineError:
                raise
            except TimeoutError as error:
                raise DeadlineError(f"{name}: no answer in {deadline_s:g} s") from error

    def _lock(self, tool: Tool2, arguments: dict[str, Any]) -> asyncio.Lock:
        """Return what the call waits for: its path's writers, the terminal's turn, or nothing."""
        if tool.is_write:
            return self._locks[checked_path(arguments["path"])]
        return self._locks[_TERMINAL] if tool.is_terminal else asyncio.Lock()


def tool_schemas_2() -> list[dict[str, object]]:
    """Return the tools in the form that chat-completion clients send and expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": tool.description,
                "parameters": {
                    "type": "object",
                    "properties": {key: one.schema() for key, one in tool.arguments.items()},
                    "required": [k for k, one in tool.arguments.items() if one.is_required],
                    "additionalProperties": False,
                },
            },
        }
        for name, tool in TOOLS_2.items()
    ]
