"""Lossy telemetry: what each actor does and waits for."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Message, Stream
from penstock.messages.settings import NonNegativeFloat


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One await in progress: an edge of the wait-for graph."""

    target: str
    """Whom or what it waits for: an actor role, `sandbox`, `group 12`."""
    reason: str
    since: float
    """Unix seconds."""
    deadline_s: float
    policy_version: int = -1


class ActorReported(Event, frozen=True, kw_only=True):
    """Runtime -> monitor, once a second."""

    stream: ClassVar[Stream] = Stream.METRICS
    actor: str
    role: str
    at: float
    """Unix seconds."""
    busy_s: float
    """Time spent working, not waiting, since the actor started."""
    uptime_s: float
    num_handled: int
    num_queued: int
    gauges: dict[str, float] = {}
    waits: list[Wait] = []
    processor_s: dict[str, float] = {}
    """As `ProcessorUsed`; empty where nobody measures it."""

    def key(self) -> str:
        """Name the actor; the latest wins."""
        return self.actor


class ProcessorUsed(Event, frozen=True, kw_only=True):
    """Runtime or launcher -> monitor, and the actor itself after a restart. The latest wins."""

    stream: ClassVar[Stream] = Stream.CREDITS
    actor: str
    role: str
    processor_s: dict[str, NonNegativeFloat]
    """Processor seconds over all of its starts: `process`, its part of its process; `machines`, the
    host's for the machines that it ended; `engine`, a generator's for its engine's process."""

    def key(self) -> str:
        """Name the actor; the latest wins."""
        return self.actor


class MidtrainProgressed(Event, frozen=True, kw_only=True):
    """Trainer -> monitor, command line."""

    stream: ClassVar[Stream] = Stream.METRICS
    num_tokens: int
    num_tokens_total: int
    loss: float
    heldout_loss: float = 0.0
    """0 where it was not measured at this point."""
    tokens_per_s: float = 0.0
    num_saves: int = 0
    num_tokens_saved: int = 0
    """Of the newest save: a killed trainer goes on from there."""

    def key(self) -> str:
        """Name all alike; the latest wins."""
        return "progress"


class ReadMonitor(Message, frozen=True, kw_only=True):
    """Gateway, command line -> monitor: give the state of the run."""


class MonitorSnapshot(Message, frozen=True, kw_only=True):
    """Monitor -> client. At most 512 KiB: curves are thinned, tails are cut."""

    state_json: bytes
    """`actors/monitor/state.py` as JSON."""
    exposition: bytes
    """The same in Prometheus' text format."""


def percentile(values: Iterable[float], percent: int) -> float:
    """Return a percentile by nearest rank; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0
