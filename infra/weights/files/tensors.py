"""Tensors that can be read piece by piece, wherever they lie."""

from typing import Protocol

import msgspec
import numpy as np

from penstock.kernels.digest import TensorHasher
from penstock.kernels.element_types import BYTES, TensorSpec

Key = tuple[bool, str]
"""Whether it is a file's plain bytes, and the name: tensors of two checkpoints match by it."""


class Tensor(TensorSpec, frozen=True, array_like=True):
    """A tensor, or the plain bytes of a file: the name is then its path, with `/` between parts."""

    @property
    def key(self) -> Key:
        """What it is matched by in another checkpoint."""
        return self.is_plain_bytes, self.name

    @property
    def is_plain_bytes(self) -> bool:
        """Whether it is the plain bytes of a file."""
        return self.dtype == BYTES

    @property
    def num_words(self) -> int:
        """The number of its words."""
        return self.num_bytes // self.element_type.word_bytes

    @property
    def word_dtype(self) -> np.dtype:
        """The numpy dtype of its words."""
        return np.dtype(f"<u{self.element_type.word_bytes}")

    def is_base_of(self, other: "Tensor") -> bool:
        """Return whether `other` is coded as changes of this one: same dtype, as many words."""
        return self.dtype == other.dtype and self.num_bytes == other.num_bytes

    def hasher(self) -> TensorHasher:
        """Return a hasher that no word was fed to yet."""
        return TensorHasher(self.element_type.numpy_name, self.shape)


class FileLayout(msgspec.Struct, frozen=True):
    """One file: its plain bytes, then tensors, without a gap."""

    path: str
    """Relative path with `/` between parts; `model.safetensors` for a single file."""
    keys: tuple[Key, ...]
    """Its tensors, in order; the first are its plain bytes."""


class Weights(Protocol):
    """A source of tensors: what a delta is made from, and applied to."""

    @property
    def tensors(self) -> dict[Key, Tensor]:
        """Return every tensor and the plain bytes of every file."""
        ...

    @property
    def files(self) -> tuple[FileLayout, ...]:
        """Return the files, with their tensors in order."""
        ...

    @property
    def is_folder(self) -> bool:
        """Return whether the files are a folder, or a single file."""
        ...

    def read(self, key: Key, first: int, num_words: int) -> np.ndarray:
        """Read some words [num_words] of a tensor; called by several threads at once."""
        ...
