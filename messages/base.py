"""Base classes of messages and events, claims on stored parts, and arrays on the wire."""

import math
from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.errors import FormatError
from penstock.messages.settings import NonNegativeInt

FORMAT = 2
"""Format version of stored data: events, run folders, exported logs, checkpoints.

Penstock 0.1.0 wrote format 1.
"""


def check_format(found: object, what: str) -> None:
    """Refuse data that was stored in another format version.

    Args:
        found: Format version read from the data.
        what: Description of the data, for the error text.

    Raises:
        FormatError: `found` is not `FORMAT`.

    """
    if found != FORMAT:
        writer = "Penstock 0.1.0" if found == 1 else "another version of Penstock"
        raise FormatError(
            f"{what}: expected format {FORMAT}, got format {found}, written by {writer}: "
            "read it with the version that wrote it, or start a new run"
        )


class Stream(StrEnum):
    """Names of the streams; `streams.py` sets what each keeps and for how long."""

    TASKS = "tasks"
    TRAJECTORIES = "trajectories"
    REWARDS = "rewards"
    WEIGHTS = "weights"
    CREDITS = "credits"
    FEEDBACK = "feedback"
    """Recorded user requests, and the training samples made from them."""
    SIGNALS = "signals"
    """Users' feedback, kept apart so that a flood of it cannot crowd out recorded requests."""
    GATEWAY = "gateway"
    """State shared by gateways, kept in memory for minutes: the newest event of each subject."""
    TRAINING = "training"
    CONTROL = "control"
    METRICS = "metrics"
    TINKER = "tinker"
    """Calls of `penstock tinker` with their answers and saved weights."""
    DLQ = "dlq"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base class of everything sent on the bus: a msgpack map tagged with its class name.

    Evolution: new fields have a default, unknown fields are ignored, and an incompatible change is
    a new class.
    """


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Reference to an object in the run's store that holds a large part of a message."""

    object_key: str
    """Key that is unique to one publish or request, so that at most one event names the object."""
    num_bytes: NonNegativeInt
    blake3: str
    """BLAKE3 digest of the bytes, 64 hexadecimal digits."""
    secret: bytes = b""
    """Key that seals the object, of a request or reply: only who gets the claim can read it."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base class of fields that may be large: sent inside the event, or stored and claimed.

    Such a field has the type `SomePart | Claim`, or a subclass of `Claim` specific to the part.
    """

    def stored(self, claim: Claim) -> Claim:
        """Return the claim that replaces this part in its event once the part is stored."""
        return claim


class Event(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Message kept on a stream; its name is past tense for a fact, imperative for a command."""

    stream: ClassVar[Stream]
    """Stream that keeps events of this class."""
    keyed_by: ClassVar[tuple[str, ...]] = ()
    """Fields that identify an event of this class; classes without any define `key`."""

    def key(self) -> str:
        """Return the key that identifies the event within its class: dot-separated subject tokens.

        Two events of the same class and key are the same event. The bus keeps the first, or, on
        streams that keep the newest per subject, the last (`streams.py`).
        """
        if not self.keyed_by:
            raise NotImplementedError
        return ".".join(str(getattr(self, name)) for name in self.keyed_by)

    @property
    def claims(self) -> list[Claim]:
        """Claims on the parts that lie in the store."""
        return [value for value in self._values if isinstance(value, Claim)]

    @property
    def parts(self) -> dict[str, Part]:
        """Parts that are inside the event itself, by field name."""
        fields = zip(self.__struct_fields__, self._values, strict=True)
        return {name: value for name, value in fields if isinstance(value, Part)}

    def object_keys(self) -> list[str]:
        """List the stored objects that must be kept as long as this event is."""
        return [claim.object_key for claim in self.claims]

    @property
    def _values(self) -> list[object]:
        return [getattr(self, name) for name in self.__struct_fields__]


_ITEM_BYTES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "int64": 8,
    "float32": 4, "float64": 8,
}  # fmt: skip
NUM_DIMENSIONS_MAX = 8
"""Maximum number of dimensions of an `Array`."""


class Array(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Little-endian array in C order; numbers travel as bytes, never as lists.

    Raises:
        ValueError: The dtype is unknown, or the bytes do not fill the shape. A message with such an
            array fails to decode.

    """

    dtype: str
    """NumPy name of the element type: int32, float32, uint8 ..."""
    shape: tuple[NonNegativeInt, ...]
    data: bytes

    def __post_init__(self) -> None:
        """Check that dtype, shape and data agree."""
        # Checked on decoding, so that no reader can be made to read outside of `data`.
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
