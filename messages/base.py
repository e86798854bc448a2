"""The base of every message, and arrays on the wire."""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.errors import FormatError

FORMAT = 2
"""Version of what is stored: events, run folders, exported logs, checkpoints. 1 was 0.1.0's."""


def check_format(found: object, what: str) -> None:
    """Refuse data of another format version, by name.

    Raises:
        FormatError: `found` is not `FORMAT`.

    """
    if found != FORMAT:
        writer = "Penstock 0.1.0" if found == 1 else "another version of Penstock"
        raise FormatError(
            f"{what}: has format {found}, of {writer}; expected format {FORMAT}: "
            "read it with the version that wrote it, or start a new run"
        )


class Stream(StrEnum):
    """The durable streams; `streams.py` says what each keeps and for how long."""

    TASKS = "tasks"
    TRAJECTORIES = "trajectories"
    REWARDS = "rewards"
    WEIGHTS = "weights"
    CREDITS = "credits"
    FEEDBACK = "feedback"
    TRAINING = "training"
    CONTROL = "control"
    METRICS = "metrics"
    DLQ = "dlq"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """What travels on the bus, as a msgpack map tagged by its class name.

    Evolution: a new field has a default; unknown fields are ignored; a break is a new class.
    """


class Event(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A message kept on a stream. Facts are in the past tense, commands in the imperative."""

    stream: ClassVar[Stream]
    """Which stream keeps it."""

    def key(self) -> str:
        """Name what happened, once and for all: dot-separated subject tokens.

        Two events of one class with one key are the same event; the bus keeps the first
        (`streams.py` says by which means).
        """
        raise NotImplementedError


class Array(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A little-endian C-ordered array: never a list of numbers on the wire."""

    dtype: str
    """numpy name: int32, float32, uint8 ..."""
    shape: tuple[int, ...]
    data: bytes
