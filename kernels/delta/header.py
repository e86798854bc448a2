"""Header of a delta payload, and its bounds."""

from enum import IntEnum

import msgspec

from penstock.kernels.delta.dtypes import Dtype

NUM_ELEMENTS_MAX = 1 << 28
"""Maximum number of elements of an array."""
NUM_CLASSES_MAX = 16
"""Maximum number of classes of a payload."""


class Codec(IntEnum):
    """Coding of the changes in a payload."""

    EQUAL = 0
    """No body, because nothing changed."""
    CLASS_GAP_ULP = 1
    """Gaps between changed positions, separately per class of base exponents, and steps in units in
    the last place."""
    GAP_ULP = 2
    """The same, with all elements in one class."""
    BITMASK_ULP = 3
    """Bit mask of the changed positions, and steps."""
    XOR_ZSTD = 4
    """Exclusive or of base and target, split into byte planes."""
    RAW = 5
    """The full target, split into byte planes; needs no base."""

    @property
    def has_steps(self) -> bool:
        """Whether the body holds marks and steps, class by class."""
        return self in (Codec.CLASS_GAP_ULP, Codec.GAP_ULP, Codec.BITMASK_ULP)


class MarksRecord(msgspec.Struct, frozen=True):
    """Coding of the marked ones among a number of places."""

    num_coded: int
    inverted: bool
    """Whether the coded places are those without a mark."""


class ClassRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Coding of one class of elements."""

    first_key: int
    """Smallest key of the class, which extends to that of the next class."""
    num_changed: int
    changed: MarksRecord
    """Marks of the changed elements in the class."""
    large: MarksRecord
    """Marks of the steps larger than one unit among the changed elements."""

    @property
    def num_large(self) -> int:
        """Number of steps larger than one unit."""
        coded = self.large.num_coded
        return self.num_changed - coded if self.large.inverted else coded


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a payload."""

    codec: Codec
    dtype: Dtype
    num_elements: int
    """Number of elements, which have 4 bits for INT4X2 and otherwise `itemsize` bytes."""
    num_changed: int
    base_check: int
    target_check: int
    classes: tuple[ClassRecord, ...] = ()
    unary_bytes: int = 0
    """Length of the unary string within the body."""
    plain_bytes: int = 0
    """Length of the body before compression."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in memory."""
        return self.dtype.traits.itemsize

    @property
    def num_items(self) -> int:
        """Length of the array in memory."""
        return self.num_elements // (2 if self.dtype is Dtype.INT4X2 else 1)

    @property
    def plain_bytes_max(self) -> int:
        """Maximum length of the body before compression."""
        # Per element at most one bit for its mark, one for the sign, one for the mark of a large
        # step, the element's bits and one more for the size, and half a bit per series for
        # parameters.
        return self.num_elements * (self.dtype.traits.bits + 8) // 8 + 4096
