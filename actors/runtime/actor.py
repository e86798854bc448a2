"""The base class of every actor.

```
            follow (the log, in order, no ack)      consume (shared work, acked after the effects)
                        │                                      │
                        ▼                                      ▼
                 on_<event>(event, ctx) ── changes own state ──▶ returns effects (events)
                                                               │
                        runtime publishes the effects durably ◀┘ then acks
```
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from penstock.actors.runtime.context import Context
from penstock.messages.base import Event
from penstock.messages.bus import Serve

Effects = Sequence[Event]
"""Events that a handler asks the runtime to publish, in order."""


class Actor:
    """Base class for one role; single-threaded, handling followed events one at a time, in order.

    A handler is named after its event: `async def on_verdict(self, event, ctx) -> Effects`;
    `on_any` takes what has none. It
    takes time, randomness, ids and I/O only from `ctx`, so that a run can be simulated.
    """

    role: ClassVar[str]
    """Name of the role, e.g. `trainer`."""
    follows: ClassVar[tuple[type[Event], ...]] = ()
    """Event types read from the log. They need no acknowledgement: the state they build can be
    rebuilt from the log."""
    consumes: ClassVar[tuple[type[Event], ...]] = ()
    """Event types shared among the actors of this role, all from one stream; each event is
    acknowledged after its effects are published."""
    can_skip: ClassVar[bool] = True
    """Whether the state stays correct when an event is skipped because its handler raised. If not,
    the actor fails on that event, and the run ends if it fails there again."""
    num_concurrent: int = 1
    """Maximum consumed events handled at once; also the outstanding pull and the mailbox bound."""
    tick_s: float = 0.0
    """Seconds between calls of `on_tick`; 0 for none."""

    saved: tuple[str, ...] = ()
    """Attributes that are the state of a fold, and all of it that events build: it is saved in
    snapshots (`snapshots/`), and a start reads the log from there. Then history is followed in the
    order of time, and `Context.is_caught_up` says when it is over. Empty: nothing is saved."""
    snapshot_version: int = 1
    """Version of the rules by which events change the state: one more with each change of them.
    Snapshots of others are not read."""

    def mark(self) -> int:
        """Return what a snapshot must not be ahead of, e.g. the step of the weights."""
        return 0

    def can_save(self) -> bool:
        """Return whether the state may be saved now."""
        return True

    def restored(self) -> None:
        """Bring up to date what follows from a state that was just restored, after `start`."""
        return

    def services(self) -> Mapping[str, Serve]:
        """Return the request services, by service name (see `streams.service_subject`)."""
        return {}

    def processor_s(self) -> Mapping[str, float]:
        """Return CPU seconds that other processes used for this actor since its start, by kind."""
        return {}

    def not_ready(self) -> str:
        """Return why a started actor cannot serve yet; empty if it can."""
        return ""

    async def start(self, ctx: Context) -> Effects:
        """Load state; called once before any event."""
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Do periodic work."""
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Save state; called once after the last event of an orderly shutdown."""
        return ()
