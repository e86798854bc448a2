"""The base of every actor.

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
from penstock.messages.base import Event, Stream
from penstock.messages.bus import Serve

Effects = Sequence[Event]
"""What a handler asks the runtime to publish, in order."""


class Actor:
    """One role. Single-threaded: followed events are handled one at a time, in order.

    A handler is named after its event: `async def on_verdict(self, event, ctx) -> Effects`. It
    takes time, randomness, ids and I/O from `ctx` alone, so that a run can be simulated.
    """

    role: ClassVar[str]
    """e.g. `trainer`."""
    follows: ClassVar[tuple[type[Event], ...]] = ()
    """Read from the log: state derived from the log needs no acknowledgement."""
    consumes: ClassVar[tuple[type[Event], ...]] = ()
    """Shared among the actors of this role; all of one stream; settled after the effects."""
    can_skip: ClassVar[bool] = True
    """Whether its state stays right without a followed event at which its handler raises; else it
    fails there, and the run ends when it fails there again."""
    num_concurrent: int = 1
    """Consumed events handled at once = outstanding pull = the mailbox's bound."""
    tick_s: float = 0.0
    """Period of `on_tick`; 0 for none."""

    def follow_after(self) -> Mapping[Stream, int]:
        """Return the last sequence already reflected in the state, by stream."""
        return {}

    def services(self) -> Mapping[str, Serve]:
        """Return the request services, by service name (see `streams.service_subject`)."""
        return {}

    def processor_s(self) -> Mapping[str, float]:
        """Return processor seconds outside of its process since it started, by kind."""
        return {}

    def not_ready(self) -> str:
        """Return why it cannot serve yet, once it has started; empty where it can."""
        return ""

    async def start(self, ctx: Context) -> Effects:
        """Load state; called once before any event."""
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Do periodic work."""
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Save state; called once after the last event of an orderly end."""
        return ()
