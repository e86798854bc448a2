"""Carries out the calls of one turn: in parallel, but for writes to one path."""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from penstock.envs.harness.paths import checked_path
from penstock.envs.harness.registry import FINISH, ToolSpec, checked_spec
from penstock.envs.harness.result import InvalidCallError, ToolResult, bounded
from penstock.envs.sandbox import Sandbox, SandboxError
from penstock.messages.errors import DeadlineError
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

_GRACE_S = 5.0
"""On top of the tool's own bound, for the way to the machine and back."""


async def run_calls(
    sandbox: Sandbox, calls: Sequence[ToolCall], limits: Limits
) -> list[ToolResult]:
    """Carry out the calls of one turn with the tools of version 1.

    A wrong call is an outcome, not an error: its result says what was wrong and is not valid.

    Returns:
        One result a call, in the order of the calls.

    Raises:
        SandboxError: the machine failed; no result of this turn is to be used.
        DeadlineError: the machine did not answer in the tool's time and some grace.

    """
    locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
    return await in_parallel(
        _run_call(sandbox, call, limits, locks, index) for index, call in enumerate(calls)
    )


async def in_parallel(works: Iterable[Coroutine[Any, Any, ToolResult]]) -> list[ToolResult]:
    """Do all works at once; where a machine fails, end the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(work) for work in works]
    except* (SandboxError, DeadlineError) as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


async def _run_call(
    sandbox: Sandbox,
    call: ToolCall,
    limits: Limits,
    locks: defaultdict[str, asyncio.Lock],
    index: int,
) -> ToolResult:
    try:
        spec = checked_spec(call, index)
        text = await _run_tool(sandbox, spec, call, limits, locks)
    except InvalidCallError as error:
        text = bounded(f"error: {error}", limits.output_bytes_max)
        return ToolResult(name=call.name, text=text, is_valid=False)
    text = bounded(text, limits.output_bytes_max)
    return ToolResult(name=call.name, text=text, is_finish=call.name == FINISH)


async def _run_tool(
    sandbox: Sandbox,
    spec: ToolSpec,
    call: ToolCall,
    limits: Limits,
    locks: defaultdict[str, asyncio.Lock],
) -> str:
    deadline_s = limits.tool_s_max + _GRACE_S
    try:
        async with asyncio.timeout(deadline_s):
            if not spec.is_write:
                return await spec.run(sandbox, call.arguments, limits)
            async with locks[checked_path(call.arguments["path"])]:
                return await spec.run(sandbox, call.arguments, limits)
    except TimeoutError as error:
        if isinstance(error, DeadlineError):
            raise
        raise DeadlineError(f"{call.name}: no answer from the machine in {deadline_s} s") from error
