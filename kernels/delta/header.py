"""What a payload says of itself, and the bounds of it."""

from enum import IntEnum

import msgspec

from penstock.kernels.delta.gaps import MarksRecord

NUM_ELEMENTS_MAX = 1 << 28
NUM_CLASSES_MAX = 16
STREAMS_PER_CLASS = 9
_PLAIN_BYTES_PER_ELEMENT_MAX = 24
"""Over all nine streams of a class, every element changed by a large step: under 23."""


class Codec(IntEnum):
    """How a payload says what changed."""

    EQUAL = 0
    """Nothing changed: no streams."""
    RAW = 1
    """The whole target, cut into byte planes; needs no base."""
    GAP_ULP = 2
    """Gaps between changed positions, and steps in units in the last place."""
    CLASS_GAP_ULP = 3
    """The same, apart for each class of base exponents."""


class ClassRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The coding of one class of elements."""

    first_key: int
    """The class holds the base keys from here to the next class."""
    num_changed: int
    changed: MarksRecord
    """The changed among the class."""
    large: MarksRecord
    """The steps of more than one unit among the changed."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a payload says of itself."""

    codec: Codec
    itemsize: int
    num_elements: int
    num_changed: int
    base_check: int
    target_check: int
    classes: tuple[ClassRecord, ...] = ()

    @property
    def num_streams(self) -> int:
        """Return how many streams follow."""
        if self.codec is Codec.EQUAL:
            return 0
        return self.itemsize if self.codec is Codec.RAW else STREAMS_PER_CLASS * len(self.classes)

    @property
    def plain_bytes_max(self) -> int:
        """Return the bound of all streams together before compression."""
        return self.num_elements * _PLAIN_BYTES_PER_ELEMENT_MAX
