"""How long an actor works, as against waits: the time of its coroutines' own steps."""

import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from penstock.actors.runtime.clock import Clock

R = TypeVar("R")


class Meter:
    """Adds up busy seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.busy_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count work done elsewhere, e.g. in the worker thread."""
        self.busy_s += duration_s

    async def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Await `coroutine`, counting the time between its resumption and its next wait."""
        return await self._stepped(coroutine)

    @types.coroutine
    def _stepped(self, coroutine: Coroutine[Any, Any, R]) -> Generator[Any, Any, R]:
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
