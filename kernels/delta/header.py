"""What a payload says of itself, and the bounds of it."""

from enum import IntEnum

import msgspec

from penstock.kernels.delta.dtypes import Dtype

NUM_ELEMENTS_MAX = 1 << 28
NUM_CLASSES_MAX = 16


class Codec(IntEnum):
    """How a payload codes the changes."""

    EQUAL = 0
    """Nothing changed: no body."""
    CLASS_GAP_ULP = 1
    """Gaps between changed positions, separate for each class of base exponents, and steps in units
    in the last place."""
    GAP_ULP = 2
    """The same, all elements one class."""
    BITMASK_ULP = 3
    """One bit per element for the changed positions, and steps."""
    XOR_ZSTD = 4
    """The exclusive or of base and target, cut into byte planes."""
    RAW = 5
    """The whole target, cut into byte planes; needs no base."""

    @property
    def has_steps(self) -> bool:
        """Return whether the body holds marks and steps, class by class."""
        return self in (Codec.CLASS_GAP_ULP, Codec.GAP_ULP, Codec.BITMASK_ULP)


class MarksRecord(msgspec.Struct, frozen=True):
    """How some places among many are marked."""

    num_coded: int
    inverted: bool
    """The coded places are those without a mark."""


class ClassRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The coding of one class of elements."""

    first_key: int
    """The class holds the base keys from here to the next class."""
    num_changed: int
    changed: MarksRecord
    """The changed among the class."""
    large: MarksRecord
    """The steps of more than one unit among the changed."""

    @property
    def num_large(self) -> int:
        """Return how many steps are of more than one unit."""
        coded = self.large.num_coded
        return self.num_changed - coded if self.large.inverted else coded


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a payload says of itself."""

    codec: Codec
    dtype: Dtype
    num_elements: int
    """Elements of four bits for INT4X2, else of `itemsize` bytes."""
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
        """Return the bytes of an element in memory."""
        return self.dtype.traits.itemsize

    @property
    def num_items(self) -> int:
        """Return the length of the array in memory."""
        return self.num_elements // (2 if self.dtype is Dtype.INT4X2 else 1)

    @property
    def plain_bytes_max(self) -> int:
        """Return the bound of the body before compression.

        Element by element: at most one bit for the marks, one for the sign, one for the mark of a
        large step, its bits and one for the size, and half a bit a series for the parameters.
        """
        return self.num_elements * (self.dtype.traits.bits + 8) // 8 + 4096
