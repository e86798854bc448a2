"""Supervision as in OTP: who is restarted when one fails, and when to give up.

Source: Erlang/OTP, Supervision Principles: strategies, restart intensity and period.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Any

log = logging.getLogger(__name__)


class Strategy(StrEnum):
    """Who is restarted when one fails."""

    ONE_FOR_ONE = "one_for_one"
    REST_FOR_ONE = "rest_for_one"
    """Those started after it, too: they depend on it."""


class Decision(StrEnum):
    """What to do about a failure."""

    RESTART = "restart"
    """The one that failed."""
    RESTART_REST = "restart_rest"
    """It and all that were started after it."""
    ESCALATE = "escalate"
    """Give up: it is for whoever supervises the supervisor."""


class RestartPolicy:
    """Decides; owns no task, no clock. More than `intensity` failures in `period_s` escalate."""

    def __init__(
        self, *, intensity: int, period_s: float, strategy: Strategy = Strategy.ONE_FOR_ONE
    ) -> None:
        self._intensity = intensity
        self._period_s = period_s
        self._strategy = strategy
        self._failures: deque[tuple[float, str]] = deque()

    def on_failure(self, name: str, now: float) -> Decision:
        """Count one failure of a child at `now` seconds, and say what to do."""
        self._failures.append((now, name))
        while self._failures[0][0] < now - self._period_s:
            self._failures.popleft()
        if len(self._failures) > self._intensity:
            return Decision.ESCALATE
        if self._strategy is Strategy.REST_FOR_ONE:
            return Decision.RESTART_REST
        return Decision.RESTART

    def recent(self) -> list[str]:
        """Return the children that failed within the period, oldest first."""
        return [name for _, name in self._failures]


Child = Callable[[], Coroutine[Any, Any, None]]
"""Makes one life of a child; returns normally at an orderly end."""


class Supervisor:
    """Keeps children running, in the order in which they depend on each other."""

    def __init__(self, children: Mapping[str, Child], policy: RestartPolicy) -> None:
        self._children = dict(children)
        self._policy = policy
        self._running: dict[asyncio.Task[None], str] = {}
        self.num_restarts = 0

    async def run(self) -> None:
        """Run until every child has ended in good order.

        Raises:
            Exception: The failure that used up the restart intensity; all others are ended.

        """
        try:
            self._start(list(self._children))
            while self._running:
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: task.get_name()):
                    await self._on_done(task)
        finally:
            await self._end(list(self._running.values()))

    def _start(self, names: list[str]) -> None:
        for name in names:
            self._running[asyncio.create_task(self._children[name](), name=name)] = name

    async def _on_done(self, task: asyncio.Task[None]) -> None:
        name = self._running.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if name is None or error is None:
            return
        now = asyncio.get_running_loop().time()
        decision = self._policy.on_failure(name, now)
        log.warning("%s failed (%s): %s", name, error, decision)
        if decision is Decision.ESCALATE:
            raise error
        names = [name]
        if decision is Decision.RESTART_REST:
            names = self._from(name)
            await self._end(names)
        self.num_restarts += 1
        self._start(names)

    def _from(self, name: str) -> list[str]:
        order = list(self._children)
        return order[order.index(name) :]

    async def _end(self, names: list[str]) -> None:
        """Cancel, the last started first."""
        tasks = {name: task for task, name in self._running.items()}
        for name in sorted(names, key=list(self._children).index, reverse=True):
            task = tasks.get(name)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                del self._running[task]
