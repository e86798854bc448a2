"""Run life cycle."""

from typing import ClassVar

import msgspec

from penstock.messages.base import Claim, Event, Stream
from penstock.messages.settings import PositiveInt


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainer computes: what replay has to match to give the same bits."""

    engine: str = "local"
    """As `trainer.engine`."""
    num_ranks: PositiveInt = 1
    """Of one model kept by several processes; the own policy's bits do not depend on it."""
    layout: str = ""
    """Division of the model over ranks where bits depend on it; empty: they do not."""
    model: str = "own"
    """Implementation of the model's layers."""
    device: str = "cpu"
    torch: str = ""
    """Version."""
    num_threads: PositiveInt = 1
    """Of torch inside one pass."""


class RunStarted(Event, frozen=True, kw_only=True):
    """Command line -> everyone. The whole configuration, so that the log explains itself."""

    stream: ClassVar[Stream] = Stream.CONTROL
    run_id: str
    seed: int
    config_toml: str
    versions: dict[str, str]
    """penstock, python, torch, platform: what replay must match."""
    model_digests: dict[str, str] = {}
    """BLAKE3 of each file of the model that the run starts from; empty for random weights."""
    format: int = 1
    """Format version of the run's data; 0.1.0 recorded none."""
    arithmetic: Arithmetic = Arithmetic()
    """Of the trainer; runs of one process recorded none before there were ranks."""
    cached: tuple[str, ...] = ()
    """What was there already, made from the same inputs by an earlier run or command."""

    def key(self) -> str:
        """One per run."""
        return self.run_id


class RunFinished(Event, frozen=True, kw_only=True):
    """Trainer -> everyone: no further step will come."""

    stream: ClassVar[Stream] = Stream.CONTROL
    reason: str
    step: int
    is_failure: bool = False
    """Whether the run was given up: the reason says what it cannot get past."""

    def key(self) -> str:
        """One per run; one per step where a service on it is given up."""
        return f"failed.{self.step}" if self.is_failure else "finished"


class RunOpened(Event, frozen=True, kw_only=True):
    """Launcher -> everyone: it is up."""

    stream: ClassVar[Stream] = Stream.CONTROL
    incarnation: str
    is_service: bool = False
    """Whether it serves without end, instead of training up to a last step."""

    def key(self) -> str:
        """One per start of a launcher."""
        return self.incarnation


class RunClosed(Event, frozen=True, kw_only=True):
    """Launcher -> actors on other hosts: it stops, and they are to stop with it."""

    stream: ClassVar[Stream] = Stream.CONTROL
    incarnation: str
    is_complete: bool
    """Whether nothing is left to do; otherwise the run may be resumed."""

    def key(self) -> str:
        """One per start of a launcher."""
        return self.incarnation


class RanksTaken(Event, frozen=True, kw_only=True):
    """Trainer -> other trainers: the run's ranks are its own. The latest wins."""

    stream: ClassVar[Stream] = Stream.CREDITS
    incarnation: str

    def key(self) -> str:
        """One per run."""
        return "ranks"


class ActorStarted(Event, frozen=True, kw_only=True):
    """Runtime -> monitor."""

    stream: ClassVar[Stream] = Stream.CONTROL
    actor: str
    incarnation: str
    pid: int

    def key(self) -> str:
        """One per start."""
        return f"{self.actor}.{self.incarnation}"


class ActorFailed(Event, frozen=True, kw_only=True):
    """Runtime or command line -> monitor: an actor or its process ended by an error."""

    stream: ClassVar[Stream] = Stream.CONTROL
    actor: str
    incarnation: str
    error: str
    num_restarts: int

    def key(self) -> str:
        """One per failure."""
        return f"{self.actor}.{self.incarnation}"


class MessageRejected(Event, frozen=True, kw_only=True):
    """Runtime -> the dead-letter stream: a message that cannot be handled, with its cause."""

    stream: ClassVar[Stream] = Stream.DLQ
    source_stream: str
    source_sequence: int
    source_subject: str
    actor: str
    cause: str
    data: bytes
    """Bytes as received, so that it can be published again; of a claim, empty."""
    claim: Claim | None = None
    """What was received in the message's place; its object stays as long as this letter."""
    is_charged: bool = False
    """Whether the message itself is at fault: its handler raised, or it is quarantined."""

    def key(self) -> str:
        """One per source position and actor."""
        return f"{self.source_stream}.{self.source_sequence}.{self.actor}"


CHARGES_MAX = 2
"""Proven charges after which an item is quarantined."""


class ItemCharged(Event, frozen=True, kw_only=True):
    """Runtime or launcher -> everyone: a process died, or a handler failed, over an item.

    An item is what a process works on, `<role>.<message type>.<key>`: for instance
    `judge.RolloutFinished.g3-m2` or `generator.Generate.g3-m2.0-worker-1a-7`.
    """

    stream: ClassVar[Stream] = Stream.CONTROL
    item: str
    number: int
    """1 for the item's first charge."""
    cause: str
    is_proven: bool
    """Whether it alone can be the cause; else it is a suspect, one of several in progress, and
    runs by itself the next time."""
    task_id: str = ""

    def key(self) -> str:
        """One per item and charge."""
        return f"{self.item}.{self.number}"


class ItemQuarantined(Event, frozen=True, kw_only=True):
    """Runtime, launcher or pacer -> everyone: an item charged twice is not worked on again."""

    stream: ClassVar[Stream] = Stream.CONTROL
    item: str
    """As in `ItemCharged`; `pacer.Task.<name>` for a task."""
    cause: str
    task_id: str = ""

    def key(self) -> str:
        """One per item."""
        return self.item
