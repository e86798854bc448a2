"""What a tool is, and what it works with: one machine and the parts that live as long as it."""

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
    """One machine, the task's limits, and what remembers something between calls."""

    def __init__(
        self, sandbox: Sandbox, limits: Limits, embedder: Embedder | None, pages: Pages
    ) -> None:
        """Start nothing yet."""
        self.pages = pages
        self.sandbox, self.limits = sandbox, limits
        self.shell = Shell(sandbox, limits)
        self.jobs = Jobs(sandbox, limits)
        self.lints = Lints(sandbox, limits)
        self.search = CodeSearch(sandbox, embedder)


@dataclass(frozen=True)
class ToolSpec:
    """One tool; `run` gets every declared argument's value."""

    run: Callable[[Toolbox, dict[str, Any]], Awaitable[str]]
    description: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    is_read: bool = False
    """Shows the text of the file at its `path`."""
    is_write: bool = False
    """Changes the file at its `path`: such calls on one path take turns."""
    is_terminal: bool = False
    """Takes its turn at the terminal."""
