"""The specification of a tool, and the toolbox that tools share in one machine."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.envs.harness.lints import Lints
from penstock.envs.harness.pages import Pages
from penstock.envs.harness.retrieval.index import CodeSearch, Embedder
from penstock.envs.harness.terminal import Jobs, Shell
from penstock.envs.harness.tool_calls import Argument
from penstock.envs.sandbox import Sandbox
from penstock.messages.task import Limits


class Toolbox:
    """One machine with the task's limits, and the state that tools keep between calls."""

    def __init__(
        self, sandbox: Sandbox, limits: Limits, embedder: Embedder | None, pages: Pages
    ) -> None:
        self.pages = pages
        self.sandbox, self.limits = sandbox, limits
        self.shell = Shell(sandbox, limits)
        self.jobs = Jobs(sandbox, limits)
        self.lints = Lints(sandbox, limits)
        self.search = CodeSearch(sandbox, embedder)


@dataclass(frozen=True)
class ToolSpec:
    """A tool; `run` receives the value of every declared argument."""

    run: Callable[[Toolbox, dict[str, Any]], Awaitable[str]]
    description: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    is_read: bool = False
    """Whether it shows the text of the file at its `path`."""
    is_write: bool = False
    """Whether it changes the file at its `path`; such calls on one path run one after another."""
    is_terminal: bool = False
    """Whether it uses the terminal; such calls run one after another."""
