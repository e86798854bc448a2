"""Reads a run's log once and applies several folds in the same pass."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import MonitorState
from penstock.messages.base import Event
from penstock.messages.bus import Bus, Delivery


class Fold(Protocol):
    """A state that is derived from a log's events."""

    @property
    def types(self) -> tuple[type[Event], ...]:
        """Event types that the fold reads."""
        ...

    def apply(self, event: Event, at: float) -> None:
        """Apply one event that was stored at `at` (Unix seconds)."""
        ...


async def fold_log(bus: Bus, *others: Fold) -> MonitorState:
    """Return a run's state as of the last event of its log, and fill the other folds."""
    fold = RunFold()
    async for _ in fold_and_yield(bus, (fold, *others), ()):
        pass
    return fold.state(fold.last_at)


async def fold_and_yield(
    bus: Bus, folds: Sequence[Fold], types: tuple[type[Event], ...]
) -> AsyncIterator[Delivery]:
    """Yield the log's events of `types`, and apply the folds in the same pass."""
    wanted = {*types, *(event_type for fold in folds for event_type in fold.types)}
    async for delivery in bus.follow([*wanted], stop_at_end=True):
        # Folds first, so that they are up to date when the caller gets the event.
        for fold in folds:
            if type(delivery.event) in fold.types:
                fold.apply(delivery.event, delivery.stored_at)
        if type(delivery.event) in types:
            yield delivery
