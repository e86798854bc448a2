"""The waits in progress of one actor: its edges of the wait-for graph."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Generator

from penstock.actors.runtime.clock import Clock
from penstock.messages.errors import DeadlineError
from penstock.messages.telemetry import Wait

WAITS_REPORTED_MAX = 32
"""Maximum waits in one report, oldest first."""


class Waits:
    """Keeps what is waited for, since when."""

    def __init__(self, actor: str, clock: Clock) -> None:
        self._actor = actor
        self._clock = clock
        self._tokens = itertools.count()
        self._open: dict[int, Wait] = {}

    def current(self) -> list[Wait]:
        """Return the oldest waits in progress."""
        return sorted(self._open.values(), key=lambda wait: wait.since)[:WAITS_REPORTED_MAX]

    @contextlib.contextmanager
    def shown(
        self, target: str, reason: str, deadline_s: float, policy_version: int = -1
    ) -> Generator[None, None, None]:
        """Show a wait that is bounded elsewhere, and name it in that bound's error."""
        token = next(self._tokens)
        self._open[token] = Wait(
            target=target,
            reason=reason,
            since=self._clock.now(),
            deadline_s=deadline_s,
            policy_version=policy_version,
        )
        try:
            yield
        finally:
            del self._open[token]

    @contextlib.asynccontextmanager
    async def with_deadline(
        self, target: str, reason: str, deadline_s: float, policy_version: int = -1
    ) -> AsyncGenerator[None, None]:
        """Show a wait and end it at its deadline.

        Raises:
            DeadlineError: The body did not end in time.

        """
        bound = asyncio.timeout(deadline_s)
        with self.shown(target, reason, deadline_s, policy_version):
            try:
                async with bound:
                    yield
            except TimeoutError as error:
                if not bound.expired() or isinstance(error, DeadlineError):
                    raise
                raise DeadlineError(
                    f"{self._actor} waited {deadline_s:g} s for {target}: {reason}"
                ) from error
