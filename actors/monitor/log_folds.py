"""Reads a run's log once for everything that is made of it."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import MonitorState
from penstock.messages.base import Event
from penstock.messages.bus import Bus, Delivery


class Fold(Protocol):
    """What is made of a log's events."""

    @property
    def types(self) -> tuple[type[Event], ...]:
        """The event types that it reads."""
        ...

    def apply(self, event: Event, at: float) -> None:
        """Fold one event that was stored at `at` (unix seconds)."""
        ...


async def fold_log(bus: Bus, *others: Fold) -> MonitorState:
    """Return the state at the end of a run's log, as of its last event; fill the other folds."""
    fold = RunFold()
    async for _ in fold_along(bus, (fold, *others), ()):
        pass
    return fold.state(fold.last_at)


async def fold_along(
    bus: Bus, folds: Sequence[Fold], types: tuple[type[Event], ...]
) -> AsyncIterator[Delivery]:
    """Yield the log's events of `types`, and fold all others in the same pass."""
    wanted = {*types, *(each for fold in folds for each in fold.types)}
    async for delivery in bus.follow([*wanted], stop_at_end=True):
        for fold in folds:
            if type(delivery.event) in fold.types:
                fold.apply(delivery.event, delivery.stored_at)
        if type(delivery.event) in types:
            yield delivery
