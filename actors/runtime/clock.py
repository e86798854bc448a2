"""Clocks for actors: the system clock, or a virtual clock that jumps from timer to timer."""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

R = TypeVar("R")


class Clock(Protocol):
    """A source of time; sleeping is left to the event loop."""

    uses_threads: bool
    """Whether blocking work runs in a thread; a simulation runs it inline."""

    def now(self) -> float:
        """Return the Unix time in seconds."""
        ...

    def monotonic(self) -> float:
        """Return a time in seconds that never goes backwards."""
        ...


class SystemClock:
    """The clock of the machine."""

    uses_threads = True

    def now(self) -> float:
        """Return the Unix time in seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Return a time in seconds that never goes backwards."""
        return time.perf_counter()


class VirtualClock:
    """The time of the running `VirtualLoop`, counted from a fixed epoch."""

    # A thread would take real time, which the virtual clock cannot see.
    uses_threads = False
    EPOCH = 1_700_000_000.0

    def now(self) -> float:
        """Return the simulated Unix time in seconds."""
        return self.EPOCH + asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        """Return the simulated seconds since the loop was created."""
        return asyncio.get_running_loop().time()


class SimulationStuckError(RuntimeError):
    """A deadlock: all tasks wait and no timer is set."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that advances its clock by the timeout instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock and return nothing: a simulation has no sockets to wait for."""
        # asyncio passes None only when nothing is ready and no timer is set.
        if timeout is None:
            raise SimulationStuckError("deadlock: every task is waiting and no timer is set")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stops while code runs, so that the same seed gives the same run."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the simulated seconds since the loop was created."""
        return self._jumping.now_s


def run_virtual(main: Coroutine[Any, Any, R]) -> R:
    """Run a whole simulation; simulated hours take only as long as the code that runs in them.

    Raises:
        SimulationStuckError: The simulation deadlocked.

    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
