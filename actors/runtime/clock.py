"""Time as actors see it: the machine's, or a simulated one (`tests/support/virtual_clock.py`)."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time; sleeping is the event loop's."""

    uses_threads: bool
    """Blocking work goes to a thread; a simulation does it in place."""

    def now(self) -> float:
        """Unix seconds."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class SystemClock:
    """The machine's clock."""

    uses_threads = True

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.perf_counter()
