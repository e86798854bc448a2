"""Measures how long an actor computes, as opposed to waits, by timing its coroutines' steps."""

import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from penstock.actors.runtime.clock import Clock

R = TypeVar("R")


class Meter:
    """Sum of busy seconds of one actor."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.busy_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count work done elsewhere, e.g. in the worker thread."""
        self.busy_s += duration_s

    async def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Await `coroutine`, counting the time from each resumption to its next wait."""
        return await self._stepped(coroutine)

    @types.coroutine
    def _stepped(self, coroutine: Coroutine[Any, Any, R]) -> Generator[Any, Any, R]:
        # Drives the coroutine by hand, as `yield from` would, to see where each step ends.
        step: Any = coroutine.send
        value: Any = None
        while True:
            started = self._clock.monotonic()
            try:
                awaited = step(value)
            except StopIteration as end:
                return end.value
            finally:
                self.busy_s += self._clock.monotonic() - started
            try:
                value = yield awaited
                step = coroutine.send
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                value = error
                step = coroutine.throw
