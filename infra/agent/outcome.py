"""What became of an agent's work: tests, what is kept of its change, and feedback with both."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.envs.sandbox import Sandbox
from penstock.infra.agent.kept import Checkout, KeptError
from penstock.infra.agent.loop import AgentReport, End
from penstock.infra.agent.model import Model
from penstock.infra.agent.stream import AgentError

EXIT_CODES = {End.FINISHED: 0, End.TURN_LIMIT: 1, End.ANSWERED: 3, End.FAILED: 4}
"""2 is the command line's own: a wrong option, no such run."""
TESTS_FAILED = 5
Say = Callable[[str], None]
Sleep = Callable[[float], Awaitable[None]]


def exit_code(report: AgentReport) -> int:
    """Return what the command's exit code says; how the work ended comes before its tests."""
    if report.end is End.FINISHED and report.tests_passed is False:
        return TESTS_FAILED
    return EXIT_CODES[report.end]


async def run_tests(sandbox: Sandbox, command: str, seconds_max: float) -> bool:
    """Run a shell command where the agent worked; return whether it succeeded."""
    done = await sandbox.exec(["sh", "-c", command], timeout_s=seconds_max)
    return done.exit_code == 0 and not done.timed_out


async def report_outcome(model: Model, report: AgentReport) -> None:
    """Report how the work ended, and its tests."""
    signals = {"agent_finished": float(report.end is End.FINISHED)}
    if report.tests_passed is not None:
        signals["tests_passed"] = float(report.tests_passed)
    await _send(model, report, signals)


@asynccontextmanager
async def watched(folder: Path, say: Say) -> AsyncGenerator["Watch"]:
    """Observe a checkout's files from now on."""
    with tempfile.TemporaryDirectory(prefix="penstock-agent-") as scratch:
        yield await Watch.start(Checkout(folder, Path(scratch)), say)


class Watch:
    """The checkout's files before and after the agent, and how much of its change is kept."""

    def __init__(self, checkout: Checkout, before: str, say: Say) -> None:
        self._checkout, self._before, self._say = checkout, before, say
        self._after = ""

    @classmethod
    async def start(cls, checkout: Checkout, say: Say) -> "Watch":
        """Remember the files before the agent."""
        try:
            return cls(checkout, await checkout.snapshot(), say)
        except KeptError as error:
            say(f"what is kept is not measured: {error}")
            return cls(checkout, "", say)

    async def agent_done(self) -> None:
        """Remember the files that the agent left."""
        try:
            self._after = await self._checkout.snapshot() if self._before else ""
        except KeptError as error:
            self._say(f"what is kept is not measured: {error}")

    async def report_kept(
        self, model: Model, report: AgentReport, minutes: float, sleep: Sleep = asyncio.sleep
    ) -> None:
        """Wait, measure, and report."""
        if not self._after:
            return
        self._say(f"in {minutes:g} minutes: how much of the change is kept (Ctrl-C: no matter)")
        await sleep(minutes * 60.0)
        try:
            later = await self._checkout.snapshot()
            report.diff_kept = await self._checkout.kept(self._before, self._after, later)
        except KeptError as error:
            self._say(f"what is kept is not measured: {error}")
        if report.diff_kept is not None:
            await _send(model, report, {"diff_kept": report.diff_kept})


async def _send(model: Model, report: AgentReport, signals: dict[str, float]) -> None:
    """Send signals; a refusal is in the report, and changes nothing else."""
    for name, value in signals.items():
        try:
            await model.give_feedback(name, value)
        except AgentError as error:
            report.feedback_refused = str(error)
        else:
            report.feedback[name] = value
