"""The tools of one episode: calls of a turn are checked, and run in its machine.

```
 calls of a turn ─▶ check ─▶ all at once, but for writes to one path and commands of the terminal
```
The same session runs in training, over a microVM, and in production, over a checkout: what a tool
returns depends on the files, the commands and nothing else.
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
"""Calls of one turn that are carried out; further ones are invalid."""
NAME_CHARACTERS_MAX = 64
"""A longer name is no tool's; what is kept of it is cut."""
_FINISH = "finish"
_GRACE_S = 20.0
"""Added to a tool's own time limit: more than a host is given to report that a machine hangs
(`LeaseSpec.margin_s`), which may be the policy's doing."""
_TERMINAL = "the terminal"
_NO_PAGES: Mapping[str, str] = {}


class ToolSession:
    """The tools of one episode.

    Args:
        version: Of the harness.
        sandbox: Where the tools work.
        limits: Of the task: seconds of a call, bytes of an observation.
        embedder: For semantic search; without one it ranks by words alone.
        sleep_s: Of the task: the machine sleeps for a time between these before each call.
        pages: Texts by path that `read_file` shows once each (`Task.pages`).

    Raises:
        NotFoundError: No such version; the text lists them.

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
        """How long each call of the newest turn took, its wait for others included."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def resume(self, turns: Iterable[Turn]) -> None:
        """Take stored turns whose calls have run in this machine."""
        for turn in turns:
            self._toolbox.pages.skip(turn.calls[:CALLS_MAX])

    async def run(
        self, calls: Sequence[ToolCall], now: Callable[[], float] = time.monotonic
    ) -> list[ToolResult]:
        """Carry out the calls of one turn; a wrong call is an outcome, not an error.

        Args:
            calls: The calls.
            now: The clock that they are timed by, in seconds.

        Returns:
            One result per call, in the order of the calls.

        Raises:
            SandboxError: The machine failed; no result of this turn is to be used.
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
            choices = f"; there are {', '.join(self._tools)}" if self._names_tools else ""
            raise InvalidCallError(f"no tool {call.name}{choices}")
        return tool, checked_arguments(call.name, tool.arguments, call.arguments)

    async def _within_time(self, name: str, tool: ToolSpec, arguments: dict[str, Any]) -> str:
        deadline_s = self._limits.tool_s_max + _GRACE_S + self._sleep_s[1]
        async with self._lock(tool, arguments):
            try:
                async with asyncio.timeout(deadline_s):
                    await self._sleep(name)
                    return await tool.run(self._toolbox, arguments)
            except DeadlineError:
                raise
            except TimeoutError as error:
                raise DeadlineError(f"{name}: no answer in {deadline_s:g} s") from error

    async def _sleep(self, name: str) -> None:
        """Have the machine sleep, where its task is slow; the end of the work needs no machine."""
        if name != _FINISH and self._sleep_s[1] > 0:
            seconds = random.uniform(*self._sleep_s)
            await self._sandbox.exec(["sleep", f"{seconds:.3f}"], timeout_s=2 * seconds + 1.0)

    def _lock(self, tool: ToolSpec, arguments: dict[str, Any]) -> asyncio.Lock:
        """Return what the call waits for: its path's writers, the terminal's turn, or nothing."""
        if tool.is_write:
            return self._locks[checked_path(arguments["path"])]
        return self._locks[_TERMINAL] if tool.is_terminal else asyncio.Lock()


def tools_called(calls: Sequence[ToolCall]) -> list[str]:
    """Return the names of a turn's calls, as far as they are carried out; the policy wrote them."""
    return [call.name[:NAME_CHARACTERS_MAX] for call in calls[:CALLS_MAX]]


async def _in_parallel(works: Iterable[Coroutine[Any, Any, ToolResult]]) -> list[ToolResult]:
    """Do all works at once; where a machine fails, end the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(work) for work in works]
    except* (SandboxError, DeadlineError) as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]
