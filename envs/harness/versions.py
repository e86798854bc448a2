"""The harness of an episode by its version: what a rollout worker opens once a machine."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from penstock.envs.harness import HARNESS_VERSION, HARNESS_VERSION_2, HARNESS_VERSIONS
from penstock.envs.harness.result import ToolResult
from penstock.envs.harness.run import run_calls
from penstock.envs.harness.session import Session
from penstock.envs.sandbox import Sandbox
from penstock.messages.errors import NotFoundError
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

Tools = Callable[[Sequence[ToolCall]], Awaitable[list[ToolResult]]]


def open_tools(version: str, sandbox: Sandbox, limits: Limits) -> Tools:
    """Return what carries out the calls of one turn.

    Raises:
        NotFoundError: No such version; the text lists them.

    """
    if version == HARNESS_VERSION:
        return partial(_run_version_1, sandbox, limits)
    if version == HARNESS_VERSION_2:
        return Session(sandbox, limits).run
    choices = ", ".join(HARNESS_VERSIONS)
    raise NotFoundError(f"harness version {version!r}: expected one of {choices}")


async def _run_version_1(
    sandbox: Sandbox, limits: Limits, calls: Sequence[ToolCall]
) -> list[ToolResult]:
    return await run_calls(sandbox, calls, limits)
