"""The commands that README and docs print, and what becomes of each in the tests.

A command whose beginning is in no table fails `test_commands.py`: execute it, or say why not.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"(?:\.venv[\w-]*/bin/)?(?:penstock|make|python|pip|helm|kubectl)\b|[A-Z_]+=")

FAST = (*("penstock init", "penstock images ls", "penstock deploy render", "penstock weights"),)
"""Executed in a temporary folder, by `test_commands.py`, in the order of their page."""
SLOW = (
    *("penstock status", "penstock show", "penstock log", "penstock replay", "penstock lineage"),
    *("penstock --runs-dir elsewhere", "penstock export", "penstock experiment"),
    *("penstock quarantine", "penstock doctor", "penstock fidelity", "penstock label"),
    *("penstock mismatch latest", "penstock chat RUN --workspace", "penstock erase"),
)
"""Executed on a small run by `test_commands_on_a_run.py`."""
NOT_RUN = {
    ". .venv/bin/activate": "changes the shell",
    "cd my-project": "changes the folder",
    "pip install": "changes the environment",
    "make": "whole targets; that they exist is checked",
    "'OPENAI_API_KEY=": "other people's agents: tests/clients",
    "'ANTHROPIC_BASE_URL=": "as above",
    ".venv-ranks/bin/penstock run": "a whole run in another environment: tests/engines",
    "penstock run": "a whole run, or one of a folder; the configuration and its --set are loaded",
    "penstock serve": "serves without end: tests/e2e/serve; the configuration is loaded",
    "penstock top": "shows without end: tests/e2e/test_monitor_status.py",
    "printf": "feeds the command after it",
    "penstock chat": "needs an endpoint or a terminal: tests/unit/harness/test_agent_chat.py",
    "penstock agent": "needs an endpoint: tests/unit/harness/test_harness_agent.py",
    "PENSTOCK_AGENT_KEY=": "as above",
    "penstock sink": "needs extras or a receiver: tests/unit/sinks/test_sinks.py",
    "penstock channel": "needs a run that is up: tests/e2e/serve/test_serve_gates.py",
    "penstock actor": "needs several hosts: tests/e2e/test_run_hosts.py",
    "penstock mismatch": "minutes: tests/unit/infra/test_mismatch_command.py",
    "penstock bench": "minutes to hours of a quiet machine",
    "penstock simulate": "minutes: tests/sim/users/test_users_parts.py",
    "penstock judge": "needs an endpoint: tests/e2e/judges",
    "penstock tasks": "minutes of machines: tests/contract/test_tasks_commits_vm.py",
    "penstock images": "needs a package mirror: tests/unit/infra/test_images_command.py",
    "python -m pytest": "of a project by `penstock init`: tests/unit/infra/test_own_parts.py",
    "helm": "needs a cluster",
    "kubectl": "needs a cluster",
}
"""Beginning of a command -> why no test executes it; the real parser reads it all the same."""


class Command(NamedTuple):
    """One command as a page prints it, without its comment."""

    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, language and content of each fenced block."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start()) + 2, match[1], match[2]


def commands() -> list[Command]:
    """Return every command of every block of shell, in the order of the pages."""
    return [
        Command(str(page.relative_to(ROOT)), first + number, part)
        for page in pages()
        for first, language, content in blocks(page)
        if language == "sh"
        for number, line in _lines(content)
        for part in _parts(line)
    ]


def _lines(content: str) -> Iterator[tuple[int, str]]:
    """Yield the lines, continued ones as one."""
    before, started = "", 0
    for number, line in enumerate(content.splitlines()):
        started = started if before else number
        if line.endswith("\\"):
            before += line[:-1]
            continue
        yield started, before + line
        before = ""


def _parts(line: str) -> Iterator[str]:
    words = shlex.split(line, comments=True)
    parts: list[list[str]] = [[]]
    for word in words:
        if word in {"&&", "|"}:
            parts.append([])
        else:
            parts[-1].append(word)
    yield from (shlex.join(part) for part in parts if part)


def penstock_words(command: Command) -> list[str]:
    """Return the arguments of `penstock`, of any environment's; empty for other programs."""
    words = [word for word in command.words if not re.match(r"[A-Z_]+=", word)]
    return words[1:] if words and words[0].rpartition("/")[2] == "penstock" else []
