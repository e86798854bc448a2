"""Tensors that can be read piece by piece, wherever they lie."""

from typing import Protocol

import msgspec
import numpy as np
import xxhash

from penstock.infra.weights.files.dtypes import BYTES, DTYPES, WORD_DTYPES, num_bytes_of
from penstock.kernels.delta import Dtype as Kind

Key = tuple[bool, str]
"""Whether it is a file's plain bytes, and the name: what two checkpoints are matched by."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One row of a tensor table."""

    name: str
    """Of plain bytes: the file's path in the folder, `/` between its parts."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> Key:
        """Return what it is matched by."""
        return self.dtype == BYTES, self.name

    @property
    def num_bytes(self) -> int:
        """Return its size."""
        return num_bytes_of(self.dtype, self.shape)

    @property
    def word_bytes(self) -> int:
        """Return the size of its words."""
        return DTYPES[self.dtype].word_bytes

    @property
    def kind(self) -> Kind:
        """Return what the codec takes its words for."""
        return DTYPES[self.dtype].kind

    @property
    def num_words(self) -> int:
        """Return how many words it has."""
        return self.num_bytes // self.word_bytes

    @property
    def word_dtype(self) -> np.dtype:
        """Return the dtype of its words."""
        return WORD_DTYPES[self.word_bytes]

    def is_base_of(self, other: "Tensor") -> bool:
        """Say whether `other` is coded as changes of this one: same dtype, as many words."""
        return self.dtype == other.dtype and self.num_bytes == other.num_bytes


class FileLayout(msgspec.Struct, frozen=True):
    """One file: its plain bytes, then tensors, without a gap."""

    path: str
    """Relative, `/` between its parts; of a file that stands alone, `model.safetensors`."""
    keys: tuple[Key, ...]
    """What it holds, in order; the first are its plain bytes."""


class Weights(Protocol):
    """What a delta is made from, and what it is applied to."""

    @property
    def tensors(self) -> dict[Key, Tensor]:
        """Return every tensor and the plain bytes of every file."""
        ...

    @property
    def files(self) -> tuple[FileLayout, ...]:
        """Return how they lie in files."""
        ...

    @property
    def is_folder(self) -> bool:
        """Say whether the files make a folder, or one stands alone."""
        ...

    def read(self, key: Key, first: int, num_words: int) -> np.ndarray:
        """Read some words [num_words] of a tensor; called by several threads at once."""
        ...


class TensorHasher:
    """Digests one tensor, fed in order: the digest of `kernels.digest.tensor_digest`."""

    def __init__(self, tensor: Tensor) -> None:
        self._hash = xxhash.xxh3_128(f"{DTYPES[tensor.dtype].numpy_name}{tensor.shape}".encode())

    def update(self, words: np.ndarray) -> None:
        """Add the next words."""
        self._hash.update(words.data)

    def digest(self) -> bytes:
        """Return the 16 bytes of the xxh3-128 of dtype, shape and bytes."""
        return self._hash.digest()
