"""Simulated time: a clock and an event loop that jump from timer to timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class VirtualClock:
    """The time of the running `VirtualLoop`, from a fixed epoch."""

    uses_threads = False
    EPOCH = 1_700_000_000.0

    def now(self) -> float:
        """Unix seconds."""
        return self.EPOCH + asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return asyncio.get_running_loop().time()


class SimulationStuckError(RuntimeError):
    """All tasks wait and no timer is set: a deadlock."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for its timeout, lets the time pass at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return nothing: a simulation has no outside."""
        if timeout is None:
            raise SimulationStuckError("every task waits, and no timer is set")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stops while code runs: the same seed gives the same run."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jumping.now_s


def run_virtual(main: Coroutine[Any, Any, R]) -> R:
    """Run a whole simulation; hours of its time take as long as its code.

    Raises:
        SimulationStuckError: It deadlocked.

    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
