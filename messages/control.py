"""Events in the life cycle of runs and actors, and failures of messages and work items."""

from typing import ClassVar

import msgspec

from penstock.messages.base import Claim, Event, Stream
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt, PositiveInt


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the trainer's arithmetic, which a replay must match to get the same bits."""

    engine: str = "local"
    """Value of `trainer.engine`."""
    num_ranks: PositiveInt = 1
    """Number of processes that share the model; the built-in policy's bits do not depend on it."""
    layout: str = ""
    """Division of the model over ranks; empty if the bits do not depend on it."""
    model: str = "own"
    """Implementation of the model's layers."""
    methods: list[str] = []
    """Methods of a model of transformers that decide its bits: attention, optimizer, settings."""
    device: str = "cpu"
    torch: str = ""
    """PyTorch version."""
    num_threads: PositiveInt = 1
    """PyTorch threads within one pass."""
    processor: str = ""
    """Vector units, as in `StepCompleted.arithmetic`; empty: not recorded."""


class RunStarted(Event, frozen=True, kw_only=True):
    """Command line -> everyone: the run's full configuration, so that the log is self-contained."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("run_id",)
    run_id: str
    seed: int
    config_toml: str
    versions: dict[str, str]
    """Versions that a replay must match: penstock, python, torch, platform."""
    model_digests: dict[str, str] = {}
    """BLAKE3 digest of each file of the initial model; empty for random weights."""
    format: int = 1
    """Format version of the run's data; Penstock 0.1.0 did not record it."""
    arithmetic: Arithmetic = Arithmetic()
    """Arithmetic of the trainer; not recorded in single-process runs from before ranks existed."""
    cached: tuple[str, ...] = ()
    """Prepared inputs that an earlier run or command had already made from the same sources."""


class RunFinished(Event, frozen=True, kw_only=True):
    """Trainer -> everyone: no further step will follow."""

    stream: ClassVar[Stream] = Stream.CONTROL
    reason: str
    step: int
    is_failure: bool = False
    """Whether the run was given up; `reason` then names the obstacle."""

    def key(self) -> str:
        """Return the key: one event per run, or per step for failures, as a service may go on."""
        return f"failed.{self.step}" if self.is_failure else "finished"


class RunOpened(Event, frozen=True, kw_only=True):
    """Launcher -> everyone: the launcher is up."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("incarnation",)
    incarnation: str
    is_service: bool = False
    """Whether the run serves indefinitely instead of training up to a last step."""


class RunClosed(Event, frozen=True, kw_only=True):
    """Launcher -> actors on other hosts: stop, because the launcher is stopping."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("incarnation",)
    incarnation: str
    is_complete: bool
    """Whether the run is complete; otherwise it may be resumed."""


class RanksTaken(Event, frozen=True, kw_only=True):
    """Trainer -> other trainers: this trainer has taken over the run's ranks; the latest counts."""

    stream: ClassVar[Stream] = Stream.CREDITS
    incarnation: str

    def key(self) -> str:
        """Return the key: one event per run."""
        return "ranks"


class LogArchived(Event, frozen=True, kw_only=True):
    """Launcher -> readers of the log, monitor: how full a stream is, and where its archive ends."""

    stream: ClassVar[Stream] = Stream.CREDITS
    of: Stream
    last: NonNegativeInt
    """Last sequence of this run that is in the archive; 0 for none."""
    num_bytes: NonNegativeInt
    """Bytes in the stream, of all runs of the server."""
    bytes_max: NonNegativeInt
    """Bytes above which the stream refuses events."""
    num_events: NonNegativeInt
    at: NonNegativeFloat
    """Unix seconds."""

    def key(self) -> str:
        """Return the key: the newest of each stream counts."""
        return f"archive.{self.of}"


class ActorStarted(Event, frozen=True, kw_only=True):
    """Runtime -> monitor: an actor started."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("actor", "incarnation")
    actor: str
    incarnation: str
    pid: int


class ActorFailed(Event, frozen=True, kw_only=True):
    """Runtime or command line -> monitor: an error ended an actor or its process."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("actor", "incarnation")
    actor: str
    incarnation: str
    error: str
    num_restarts: int


class MessageRejected(Event, frozen=True, kw_only=True):
    """Runtime -> dead-letter stream: a message could not be handled."""

    stream: ClassVar[Stream] = Stream.DLQ
    keyed_by: ClassVar[tuple[str, ...]] = ("source_stream", "source_sequence", "actor")
    source_stream: str
    source_sequence: int
    source_subject: str
    actor: str
    cause: str
    data: bytes
    """Bytes as received, so that they can be published again; empty if `claim` is set."""
    claim: Claim | None = None
    """Claim that was received in place of the message; its object is kept as long as this event."""
    is_charged: bool = False
    """Whether the message itself is to blame: its handler raised, or it is quarantined."""


CHARGES_MAX = 2
"""Number of proven charges after which an item is quarantined."""


class ItemCharged(Event, frozen=True, kw_only=True):
    """Runtime or launcher -> everyone: a process died or a handler failed while on an item.

    An item is one unit of work, named `<role>.<message type>.<key>`, e.g.
    `judge.RolloutFinished.g3-m2` or `generator.Generate.g3-m2.0-worker-1a-7`.
    """

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("item", "number")
    item: str
    number: int
    """Number of the charge, 1 for the item's first."""
    cause: str
    is_proven: bool
    """Whether the item was the only one in progress; otherwise it is one of several suspects, and
    runs alone the next time."""
    task_id: str = ""


class ItemQuarantined(Event, frozen=True, kw_only=True):
    """Runtime, launcher or pacer -> everyone: an item charged twice will not be retried."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("item",)
    item: str
    """Name of the item, as in `ItemCharged`; `pacer.Task.<name>` for a task."""
    cause: str
    task_id: str = ""
