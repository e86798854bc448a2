"""The commands that README and docs print, and what becomes of each in the tests.

A command whose beginning is in no table fails `test_commands.py`: execute it, or say why not.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.lab.__main__ import main as lab_main

from penstock.infra.cli import main

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(
    r"(?:\.venv[\w-]*/bin/)?(?:penstock|make|python|pip|helm|kubectl)\b(?! =)|[A-Z_]+="
)

FAST = (
    *("penstock init", "penstock images ls", "penstock deploy render", "penstock weights"),
    *(". .venv/bin/activate", "cd my-project", "python -m pytest", "penstock judge attack"),
    "python -m tests.lab simulate-weights",
)
"""Executed by `test_commands.py`, in the order of their page."""
SLOW = (
    *("penstock status", "penstock show", "penstock log", "penstock replay", "penstock lineage"),
    *("penstock --runs-dir elsewhere", "penstock export", "penstock experiment"),
    *("penstock quarantine", "penstock doctor", "python -m tests.lab fidelity", "penstock label"),
    *("penstock mismatch latest", "penstock run --resume", "penstock evals"),
)
"""Executed on a small run by `test_commands_on_a_run.py`."""
ADAPTED = ("penstock export tuned",)
"""Executed by tests/e2e/corpora/test_run_adapter.py, which follows docs/lora.md."""
JUDGES = ("penstock judge calibrate", "penstock judge audit")
"""Executed there with a judge that answers."""
SERVED = (
    *("penstock top", "penstock channel", "penstock chat", "printf", "penstock agent"),
    "PENSTOCK_AGENT_KEY=",
)
"""Executed there on a service of that run."""
SERVING = ("penstock serve",)
"""Executed there until it answers."""
ERASING = ("penstock erase",)
SINKS = ("penstock sink",)
"""Executed there where the sink's extra is installed."""
IN_MACHINES = (
    *(
        "penstock tasks make ../my-checkout",
        "penstock tasks make penstock.examples",
        "penstock tasks check",
    ),
    *("penstock tasks stats", "penstock images build mytask", "penstock images gc"),
)
"""Executed by `test_commands_in_machines.py`."""
EXECUTED = (*FAST, *SLOW, *ADAPTED, *JUDGES, *ERASING, *SERVED, *SERVING, *SINKS, *IN_MACHINES)
NOT_RUN = {
    "pip install": "changes the environment",
    "make": "whole targets, of which CI runs `make test`; that they exist is checked",
    "'OPENAI_API_KEY=": "other people's agents: tests/clients",
    "'ANTHROPIC_BASE_URL=": "as above",
    ".venv-ranks/bin/penstock run": "a whole run in another environment: tests/engines",
    "penstock run --config": "whole runs; the configuration and its --set are loaded",
    "penstock actor": "needs several hosts: tests/e2e/test_run_hosts.py",
    "penstock mismatch RUN": "minutes; that of the newest run is executed",
    "python -m tests.lab": "minutes to hours of a quiet machine",
    "python -m tests.lab simulate-users": "15 minutes: tests/sim/users/test_users_parts.py",
    "python -m tests.lab simulate-sandboxes": "minutes: tests/sim/test_sandbox_fleet_burst.py",
    "penstock tasks make stdlib": "hundreds of tasks, minutes of machines",
    "penstock images build pg": "needs a mirror of Debian's packages",
    "penstock models get": "fetches a package of 100 MB: tests/unit/models",
    "penstock tasks import": "somebody's collection: tests/unit/tasks/test_task_readers.py",
    "penstock tasks get": "as above",
    "penstock tasks images": "minutes: tests/contract/sandbox/test_sandbox_container_images.py",
    "penstock images pull": "needs a registry: tests/unit/images",
    "penstock images build FOLDER": "minutes of machines: tests/unit/images",
    "penstock backup": "of a live run: tests/contract/bus/archive/test_bus_backup.py",
    "penstock --runs-dir restored restore": "as above",
    "penstock restore": "as above",
    "penstock move": "needs three servers: tests/contract/bus/archive/test_bus_backup.py",
    "penstock tinker": "a server for the SDK: tests/clients/test_tinker.py follows its page",
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
        if word == "&&":
            parts.append([])
        else:
            parts[-1].append(word)
    yield from (joined(part) for part in parts if part)


def joined(words: list[str]) -> str:
    """Return words as a line of shell; a pipe stays one."""
    return " ".join(word if word == "|" else shlex.quote(word) for word in words)


def execute(command: Command | str, **replaced: str) -> None:
    """Execute a printed command of `penstock`, or of the laboratory, in the current folder."""
    command = command if isinstance(command, Command) else Command("", 0, command)
    is_lab = bool(lab_words(command))
    words = lab_words(command) if is_lab else penstock_words(command)
    words = [replaced.get(word, word) for word in words]
    assert (lab_main(words) if is_lab else main(words)) == 0, command.name


def lab_words(command: Command) -> list[str]:
    """Return the arguments of `python -m tests.lab`; empty for other programs, and for its list."""
    return command.words[3:] if command.words[:3] == ["python", "-m", "tests.lab"] else []


def penstock_words(command: Command) -> list[str]:
    """Return the arguments of `penstock`, of any environment's; empty for other programs."""
    words = [word for word in command.words if not re.match(r"[A-Z_]+=", word)]
    words = words[words.index("|") + 1 :] if "|" in words else words
    return words[1:] if words and words[0].rpartition("/")[2] == "penstock" else []
