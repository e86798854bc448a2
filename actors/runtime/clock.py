"""Clocks for actors: the system clock; tests have a virtual one (`tests/support`)."""

import time
from typing import Protocol


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
