"""Telemetry of actors, which may be lost: their work, what they wait for, and CPU time."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Message, Stream
from penstock.messages.settings import NonNegativeFloat


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Wait in progress: an edge of the wait-for graph."""

    target: str
    """Target of the wait: an actor role, `sandbox`, `group 12`."""
    reason: str
    since: float
    """Start of the wait in Unix seconds."""
    deadline_s: float
    policy_version: int = -1


class ActorReported(Event, frozen=True, kw_only=True):
    """Runtime -> monitor: state of an actor, once a second."""

    stream: ClassVar[Stream] = Stream.METRICS
    keyed_by: ClassVar[tuple[str, ...]] = ("actor",)
    actor: str
    role: str
    at: float
    """Time of the report in Unix seconds."""
    busy_s: float
    """Seconds that the actor spent working, not waiting, since it started."""
    uptime_s: float
    num_handled: int
    num_queued: int
    gauges: dict[str, float] = {}
    waits: list[Wait] = []
    processor_s: dict[str, float] = {}
    """CPU seconds as in `ProcessorUsed`; empty if not measured."""


class ProcessorUsed(Event, frozen=True, kw_only=True):
    """Runtime or launcher -> monitor, and the actor itself after a restart: CPU time used."""

    stream: ClassVar[Stream] = Stream.CREDITS
    keyed_by: ClassVar[tuple[str, ...]] = ("actor",)
    actor: str
    role: str
    processor_s: dict[str, NonNegativeFloat]
    """CPU seconds over all starts of the actor: `process`, its share of its process; `machines`,
    host time of the machines that it ended; `engine`, a generator's engine process."""


class MidtrainProgressed(Event, frozen=True, kw_only=True):
    """Trainer -> monitor, command line: progress of mid-training."""

    stream: ClassVar[Stream] = Stream.METRICS
    num_tokens: int
    num_tokens_total: int
    loss: float
    heldout_loss: float = 0.0
    """Held-out loss; 0 if it was not measured at this point."""
    tokens_per_s: float = 0.0
    num_saves: int = 0
    num_tokens_saved: int = 0
    """Number of tokens at the newest save, from which a killed trainer resumes."""

    def key(self) -> str:
        """Return the key: only the newest event counts."""
        return "progress"


class ReadMonitor(Message, frozen=True, kw_only=True):
    """Gateway, command line -> monitor: send the state of the run."""


class MonitorSnapshot(Message, frozen=True, kw_only=True):
    """Monitor -> client: state of the run, at most 512 KiB; long curves and lists are shortened."""

    state_json: bytes
    """State of the run (`actors/monitor/state.py`) as JSON."""
    exposition: bytes
    """State of the run in Prometheus text format."""


def percentile(values: Iterable[float], percent: int) -> float:
    """Return a percentile by nearest rank, or 0 without values."""
    # Nearest rank, so that a reported percentile is a value that was measured.
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0
