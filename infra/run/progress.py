"""Progress lines of a run on standard output."""

import time

from penstock.messages.base import Event
from penstock.messages.bus import Bus
from penstock.messages.control import ActorFailed, RunFinished
from penstock.messages.reward import EvalCompleted
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import MidtrainCompleted, StepCompleted

TYPES: tuple[type[Event], ...] = (
    MidtrainProgressed, MidtrainCompleted, StepCompleted, EvalCompleted, RunFinished, ActorFailed,
)  # fmt: skip


class Progress:
    """Prints what happens, and knows when the run is complete."""

    def __init__(self, *, steps_max: int) -> None:
        self._steps_max = steps_max
        self._started = time.monotonic()
        self.is_midtraining = False
        self._final_step: int | None = None
        self._evaluated: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """The last step is taken and the last version evaluated."""
        return self._final_step is not None and self._final_step in self._evaluated

    async def follow(self, bus: Bus) -> None:
        """Print the events of the log until the run is complete."""
        async for delivery in bus.follow(TYPES):
            line = self._line(delivery.event)
            if line:
                self.say(line)
            if self.is_complete:
                return

    def say(self, line: str) -> None:
        """Print one line, with the time since the start."""
        seconds = int(time.monotonic() - self._started)
        print(f"[{seconds // 60:2d}:{seconds % 60:02d}] {line}", flush=True)

    def _line(self, event: Event) -> str:
        line = ""
        match event:
            case MidtrainProgressed():
                self.is_midtraining = True
                share = min(1.0, event.num_tokens / max(event.num_tokens_total, 1))
                speed = f"{event.tokens_per_s:,.0f} tokens/s"
                line = f"mid-training {share:4.0%}  loss {event.loss:.3f}  {speed}"
            case MidtrainCompleted():
                self.is_midtraining = False
                line = (
                    f"mid-training done: {event.num_tokens:,} tokens, loss {event.loss_first:.2f}"
                    f" -> {event.loss_last:.2f}, held-out {event.heldout_loss:.2f}"
                    f" (perplexity {event.heldout_perplexity:.2f})"
                )
            case StepCompleted():
                line = self._step_line(event)
            case EvalCompleted():
                self._evaluated.add(event.policy_version)
                line = _eval_line(event)
            case RunFinished():
                self._final_step = event.step
                line = f"training ends at step {event.step}: {event.reason}"
            case ActorFailed():
                line = f"{event.actor} failed: {event.error}"
            case _:
                pass
        return line

    def _step_line(self, event: StepCompleted) -> str:
        get = event.metrics.get
        return (
            f"step {event.step:3d}/{self._steps_max}  reward {get('reward_mean', 0):+.3f}"
            f"  pass {get('pass_rate', 0):.2f}  stale {get('staleness_max', 0):.0f}"
            f"  k3 {get('mismatch_k3', 0):.1e}  train {event.train_s:.1f} s"
            f"  wait {event.wait_s:.1f} s"
        )


def _eval_line(event: EvalCompleted) -> str:
    rate = event.num_solved / max(event.num_tasks, 1)
    categories = ", ".join(
        f"{category} {share:.2f}" for category, share in event.pass_rate_by_category.items()
    )
    return (
        f"held-out pass rate of version {event.policy_version}: {rate:.3f}"
        f" ({event.num_solved}/{event.num_tasks}; {categories})"
    )
