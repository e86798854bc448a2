"""The base of every message, what of one may lie in a store, and arrays on the wire."""

import math
from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.errors import FormatError
from penstock.messages.settings import NonNegativeInt

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
    """Requests of users, and the samples made of them."""
    SIGNALS = "signals"
    """What users say of their requests: full, it refuses no record of a request."""
    GATEWAY = "gateway"
    """What several gateways hold together, for minutes: in memory, the newest of each subject."""
    TRAINING = "training"
    CONTROL = "control"
    METRICS = "metrics"
    DLQ = "dlq"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """What travels on the bus, as a msgpack map tagged by its class name.

    Evolution: a new field has a default; unknown fields are ignored; a break is a new class.
    """


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Names an object of the run's store that holds what would be large in a message."""

    object_key: str
    """Unique to one publish or request, so that one event at most names the object."""
    num_bytes: NonNegativeInt
    blake3: str
    """Digest of the bytes, 64 hexadecimal digits."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A field that may be large: the bus leaves it in its event, or stores it and names it there.

    Such a field has the type `SomePart | Claim`, or the part's own kind of claim.
    """

    def stored(self, claim: Claim) -> Claim:
        """Return what the event has in this part's place once it is an object."""
        return claim


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

    @property
    def claims(self) -> list[Claim]:
        """Parts that lie in the store."""
        return [value for value in self._values if isinstance(value, Claim)]

    @property
    def parts(self) -> dict[str, Part]:
        """Parts that lie in the event itself, by field."""
        fields = zip(self.__struct_fields__, self._values, strict=True)
        return {name: value for name, value in fields if isinstance(value, Part)}

    def object_keys(self) -> list[str]:
        """List the objects that must stay as long as this event does."""
        return [claim.object_key for claim in self.claims]

    @property
    def _values(self) -> list[object]:
        return [getattr(self, name) for name in self.__struct_fields__]


_ITEM_BYTES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "int64": 8,
    "float32": 4, "float64": 8,
}  # fmt: skip
NUM_DIMENSIONS_MAX = 8


class Array(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A little-endian C-ordered array: never a list of numbers on the wire.

    Raises:
        ValueError: An unknown dtype, or bytes that do not fill the shape; a message with such an
            array does not decode.

    """

    dtype: str
    """numpy name: int32, float32, uint8 ..."""
    shape: tuple[NonNegativeInt, ...]
    data: bytes

    def __post_init__(self) -> None:
        """Compare dtype, shape and data."""
        item_bytes = _ITEM_BYTES.get(self.dtype)
        if item_bytes is None:
            choices = ", ".join(_ITEM_BYTES)
            raise ValueError(f"Array.dtype: expected one of {choices}, got {self.dtype!r}")
        if len(self.shape) > NUM_DIMENSIONS_MAX or min(self.shape, default=0) < 0:
            raise ValueError(
                f"Array.shape: expected at most {NUM_DIMENSIONS_MAX} sizes >= 0, got {self.shape}"
            )
        expected = math.prod(self.shape) * item_bytes
        if len(self.data) != expected:
            raise ValueError(
                f"Array.data: {self.dtype}{list(self.shape)} takes {expected} bytes, "
                f"got {len(self.data)}"
            )
