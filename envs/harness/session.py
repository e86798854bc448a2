"""The tools of one episode: checks the calls of a turn and runs them in the machine.

```
 calls of a turn ─▶ check ─▶ all at once, except for writes to one path and terminal commands
```
The same session runs in training, over a microVM, and in production, over a checkout: the result of
a tool depends only on the files and the commands.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.harness.pages import Pages
from penstock.envs.harness.retrieval.index import Embedder
from penstock.envs.harness.tool_calls import (
    InvalidCallError,
    ToolResult,
    checked_arguments,
    checked_path,
    shown_text,
    truncate,
)
from penstock.envs.harness.toolbox import Toolbox, ToolSpec
from penstock.envs.harness.tools import tools_of
from penstock.envs.sandbox import Sandbox, SandboxError
from penstock.messages.errors import DeadlineError
from penstock.messages.rollout import ToolCall, Turn
from penstock.messages.task import Limits

CALLS_MAX = 8
"""Maximum calls per turn; further ones are invalid."""
NAME_CHARACTERS_MAX = 64
"""Characters recorded of a tool's name, which the policy chooses."""
_FINISH = "finish"
_GRACE_S = 20.0
"""Added to a tool's time limit. Longer than the time that a host has to report a hanging machine
(`LeaseSpec.margin_s`), because a hang may be the policy's doing and must be reported as such."""
_TERMINAL = "the terminal"
_NO_PAGES: Mapping[str, str] = {}


class ToolSession:
    """The tools of one episode.

    Args:
        embedder: Embedder for semantic search; by default it ranks by words only.
        sleep_s: Minimum and maximum seconds that the machine sleeps before each call.
        pages: Texts by path that `read_file` shows once each (`Task.pages`).

    Raises:
        NotFoundError: The version does not exist; the text lists the others.

    Example:
        session = ToolSession("2", machine, task.limits)
        results = await session.run([ToolCall(name="glob", arguments={"pattern": "*.py"})])

    """

    def __init__(  # noqa: PLR0913 - the last two are a task's
        self,
        version: str,
        sandbox: Sandbox,
        limits: Limits,
        embedder: Embedder | None = None,
        *,
        sleep_s: tuple[float, float] = (0.0, 0.0),
        pages: Mapping[str, str] = _NO_PAGES,
    ) -> None:
        self._tools = tools_of(version)
        self._names_tools = version != HARNESS_VERSION
        self._limits = limits
        self._sandbox, self._sleep_s = sandbox, sleep_s
        self._toolbox = Toolbox(sandbox, limits, embedder, Pages(pages))
        self.elapsed_s: list[float] = []
        """Seconds of each call of the newest turn, including waits for other calls."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def resume(self, turns: Iterable[Turn]) -> None:
        """Record stored turns whose calls have run in this machine."""
        for turn in turns:
            self._toolbox.pages.skip(turn.calls[:CALLS_MAX])

    async def run(
        self, calls: Sequence[ToolCall], now: Callable[[], float] = time.monotonic
    ) -> list[ToolResult]:
        """Run the calls of one turn; an invalid call gives a result, not an exception.

        Args:
            now: Clock that times them, in seconds.

        Returns:
            One result per call, in their order.

        Raises:
            SandboxError: The machine failed; no result of this turn may be used.
            DeadlineError: The machine did not answer in time.

        """
        self.elapsed_s = [0.0] * len(calls)
        return await _in_parallel(self._timed(call, i, now) for i, call in enumerate(calls))

    async def _timed(self, call: ToolCall, index: int, now: Callable[[], float]) -> ToolResult:
        started_at = now()
        result = await self._call(call, index)
        self.elapsed_s[index] = now() - started_at
        return result

    async def _call(self, call: ToolCall, index: int) -> ToolResult:
        try:
            tool, arguments = self._checked(call, index)
            text = await self._within_time(call.name, tool, arguments)
        except InvalidCallError as error:
            text = truncate(shown_text(f"error: {error}"), self._limits.output_bytes_max)
            return ToolResult(name=call.name, text=text, is_valid=False)
        text = truncate(shown_text(text), self._limits.output_bytes_max)
        return ToolResult(name=call.name, text=text, is_finish=call.name == _FINISH)

    def _checked(self, call: ToolCall, index: int) -> tuple[ToolSpec, dict[str, Any]]:
        if index >= CALLS_MAX:
            raise InvalidCallError(f"at most {CALLS_MAX} calls a turn")
        tool = self._tools.get(call.name)
        if tool is None:
            # Version 1 keeps its wording: recorded contexts depend on each byte.
            choices = f"; there are {', '.join(self._tools)}" if self._names_tools else ""
            raise InvalidCallError(f"no tool {call.name}{choices}")
        return tool, checked_arguments(call.name, tool.arguments, call.arguments)

    async def _within_time(self, name: str, tool: ToolSpec, arguments: dict[str, Any]) -> str:
        deadline_s = self._limits.tool_s_max + _GRACE_S + self._sleep_s[1]
        async with self._lock(tool, arguments):
            # Inside the lock: a call does not spend its time waiting for other calls.
            try:
                async with asyncio.timeout(deadline_s):
                    await self._sleep(name)
                    return await tool.run(self._toolbox, arguments)
            except DeadlineError:  # A `TimeoutError` that already names what was waited for.
                raise
            except TimeoutError as error:
                raise DeadlineError(f"{name}: no answer in {deadline_s:g} s") from error

    async def _sleep(self, name: str) -> None:
        # `finish` needs no machine, so it does not sleep either.
        if name != _FINISH and self._sleep_s[1] > 0:
            seconds = random.uniform(*self._sleep_s)
            await self._sandbox.exec(["sleep", f"{seconds:.3f}"], timeout_s=2 * seconds + 1.0)

    def _lock(self, tool: ToolSpec, arguments: dict[str, Any]) -> asyncio.Lock:
        # Two writes to a path, or two commands of the stateful terminal, have an order; other calls
        # are independent and get a lock of their own.
        if tool.is_write:
            return self._locks[checked_path(arguments["path"])]
        return self._locks[_TERMINAL] if tool.is_terminal else asyncio.Lock()


def tools_called(calls: Sequence[ToolCall]) -> list[str]:
    """Return the names of a turn's calls, bounded in number and length."""
    return [call.name[:NAME_CHARACTERS_MAX] for call in calls[:CALLS_MAX]]


async def _in_parallel(works: Iterable[Coroutine[Any, Any, ToolResult]]) -> list[ToolResult]:
    # A task group and not `gather`: if the machine fails, the other calls are cancelled.
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(work) for work in works]
    except* (SandboxError, DeadlineError) as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]
