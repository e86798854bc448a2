"""An event loop for simulations with sockets and threads: time jumps while nobody is waited for.

    async with now_real():      # a request is under way: its replies take the time that they take
        ...
    await asyncio.sleep(86_400) # nothing is under way: a day passes at once

Unlike `VirtualLoop` it serves real sockets; runs are not repeatable to the bit.
"""

import asyncio
import contextlib
import selectors
import time
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

R = TypeVar("R")
WAIT_S_MAX = 0.05
"""Longest real wait between two looks at what is held."""


class _HeldSelector(selectors.DefaultSelector):
    """Waits as long as something real is under way; else lets the time pass at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_held = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, before any time passes."""
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.num_held or timeout is None:
            began = time.perf_counter()
            wait_s = WAIT_S_MAX if timeout is None else min(max(timeout, 0.0), WAIT_S_MAX)
            ready = super().select(wait_s)
            self.now_s += time.perf_counter() - began
            return ready
        self.now_s += max(timeout, 0.0)
        return []


class VirtualIoLoop(asyncio.SelectorEventLoop):
    """A loop over `_HeldSelector`."""

    def __init__(self) -> None:
        self.held = _HeldSelector()
        super().__init__(self.held)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self.held.now_s


@contextlib.contextmanager
def now_real() -> Generator[None]:
    """Let time pass as it does, inside the block."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualIoLoop)
    loop.held.num_held += 1
    try:
        yield
    finally:
        loop.held.num_held -= 1


def run_virtual_io(main: Coroutine[Any, Any, R]) -> R:
    """Run a simulation that talks to itself over sockets."""
    with asyncio.Runner(loop_factory=VirtualIoLoop) as runner:
        return runner.run(main)
