"""Progress lines of a run on standard output."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.actors.monitor.log_lines import describe
from penstock.infra.output import print_line, printable
from penstock.infra.run.runs import RunDir
from penstock.messages.base import Event
from penstock.messages.bus import Bus
from penstock.messages.control import ActorFailed, RunFinished
from penstock.messages.reward import EvalCompleted, evaluation_id
from penstock.messages.signals.preferences import PreferencesProgressed, PreferencesTrained
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import MidtrainCompleted, StepCompleted

TYPES: tuple[type[Event], ...] = (
    MidtrainProgressed, PreferencesProgressed, PreferencesTrained, MidtrainCompleted, StepCompleted,
    EvalCompleted, RunFinished, ActorFailed,
)  # fmt: skip

POLL_S = 0.05


def forget_gateways(run: RunDir) -> None:
    """Delete the addresses of gateways from an earlier start of a run."""
    for pattern in ("gateway_url*", "page_url*"):
        for file in run.path.glob(pattern):
            file.unlink()


class Progress:
    """Printer of progress lines that detects when the run is complete.

    Args:
        eval_sets: Names of the evaluation sets on which the last version is evaluated.

    """

    def __init__(self, eval_sets: Sequence[str] = ("",)) -> None:
        self._started = time.monotonic()
        self._eval_sets = eval_sets
        self.is_midtraining = False

    async def follow(self, bus: Bus) -> None:
        """Print events until the last version is evaluated, or the run is given up."""
        finished: RunFinished | None = None
        evaluated: set[str] = set()
        async for delivery in bus.follow(TYPES):
            match event := delivery.event:
                case MidtrainProgressed():
                    self.is_midtraining = True
                    share = min(1.0, event.num_tokens / max(event.num_tokens_total, 1))
                    speed = f"{event.tokens_per_s:,.0f} tokens/s"
                    self.say(f"mid-training {share:4.0%}  loss {event.loss:.3f}  {speed}")
                case PreferencesProgressed():
                    done = f"{event.num_steps} of {event.num_steps_total} steps"
                    self.say(f"preferences: {done}  loss {event.loss:.3f}")
                case MidtrainCompleted():
                    self.is_midtraining = False
                case EvalCompleted():
                    evaluated.add(event.eval_id)
                case RunFinished():
                    finished = event
                case _:
                    pass
            if line := describe(event, delivery.stored_at):
                self.say(line.text)
            if finished is not None and evaluated >= self._awaited(finished):
                return

    def _awaited(self, finished: RunFinished) -> set[str]:
        names = () if finished.is_failure else self._eval_sets
        return {evaluation_id(finished.step, name) for name in names}

    async def follow_gateways(self, run: RunDir) -> None:
        """Print the address of each gateway once it listens."""
        printed: dict[Path, str] = {}
        while True:
            for file in sorted(run.path.glob("gateway_url*")):
                url = file.read_text()
                if url not in printed.values():
                    page = run.page_url_of(file.name.partition(".")[2])
                    link = page.read_text() if page.exists() else f"{url}/"
                    self.say(f"live page: {link} (once; the next link is in {page})")
                    self.say(f"API: {url}/v1 (key in {run.gateway_key})")
                printed[file] = url
            await asyncio.sleep(POLL_S if not printed else 1.0)

    def say(self, line: str) -> None:
        """Print one line with the time since the start."""
        seconds = int(time.monotonic() - self._started)
        print_line(f"[{seconds // 60:2d}:{seconds % 60:02d}] {printable(line)}", flush=True)
