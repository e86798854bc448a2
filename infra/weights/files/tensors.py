"""Tensors that can be read piece by piece, from any source."""

from typing import Protocol

import msgspec
import numpy as np

from penstock.kernels.digest import TensorHasher
from penstock.kernels.element_types import BYTES, TensorSpec

Key = tuple[bool, str]
"""(is plain bytes, name), by which tensors of two checkpoints match."""


class Tensor(TensorSpec, frozen=True, array_like=True):
    """A tensor, or the plain bytes of a file, named by its path with `/` between parts."""

    @property
    def key(self) -> Key:
        """Key by which the tensor matches one of another checkpoint."""
        return self.is_plain_bytes, self.name

    @property
    def is_plain_bytes(self) -> bool:
        """Whether this is the plain bytes of a file."""
        return self.dtype == BYTES

    @property
    def num_words(self) -> int:
        """Number of words."""
        return self.num_bytes // self.element_type.word_bytes

    @property
    def word_dtype(self) -> np.dtype:
        """Numpy dtype of the words."""
        return np.dtype(f"<u{self.element_type.word_bytes}")

    def is_base_of(self, other: "Tensor") -> bool:
        """Return whether `other` is coded as changes of this tensor: same dtype and size."""
        return self.dtype == other.dtype and self.num_bytes == other.num_bytes

    def hasher(self) -> TensorHasher:
        """Return a new hasher for the tensor."""
        return TensorHasher(self.element_type.numpy_name, self.shape)


class FileLayout(msgspec.Struct, frozen=True):
    """One file: plain bytes, then tensors, without gaps."""

    path: str
    """Relative path with `/` between parts; `model.safetensors` for a single file."""
    keys: tuple[Key, ...]
    """Keys of the plain bytes and then of the tensors, in order."""


class Weights(Protocol):
    """A source of tensors, for making and applying deltas."""

    @property
    def tensors(self) -> dict[Key, Tensor]:
        """Tensors, and the plain bytes of files, by key."""
        ...

    @property
    def files(self) -> tuple[FileLayout, ...]:
        """Files with their tensors in order."""
        ...

    @property
    def is_folder(self) -> bool:
        """Whether the files are in a folder."""
        ...

    def read(self, key: Key, first: int, num_words: int) -> np.ndarray:
        """Read some words [num_words] of a tensor; called from several threads at once."""
        ...
