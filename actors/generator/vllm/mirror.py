"""Copy of the weights on the host, which vLLM's worker maps and loads.

There are two files with the same layout: the version in use, and the one being staged. A commit
exchanges them, so a damaged version changes nothing. Both are anonymous memory files: they vanish
with the process, however it ends, and take no space in `/dev/shm`.
"""

import os
from collections.abc import Mapping

import numpy as np

from penstock.actors.generator.base_engine import check_patch
from penstock.actors.generator.engine import InvalidRequestError
from penstock.kernels.delta import Patch
from penstock.kernels.digest import root_digest
from penstock.messages.errors import CorruptDataError

TensorRow = tuple[str, list[int], int, int]
"""Entry of one tensor in the file: name, shape, first byte, number of bytes."""


TensorChange = tuple[str, bytes]
"""Name of a tensor, and the int32 positions of its changed elements; no positions if it was
replaced as a whole."""


class _MemoryFile:
    """An anonymous memory file (memfd), closed with the object."""

    def __init__(self, num_bytes: int) -> None:
        self._number = os.memfd_create("penstock-weights")
        self.resize(num_bytes)
        # A path by which child processes can open the file although it has no name.
        self.path = f"/proc/{os.getpid()}/fd/{self._number}"

    def resize(self, num_bytes: int) -> None:
        """Set the size; what is added is zero."""
        os.truncate(self._number, num_bytes)

    def __del__(self) -> None:
        os.close(self._number)


class WeightMirror:
    """Double buffer of the weights. Not thread-safe: its owner calls one method at a time."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Create two files of zeros.

        Args:
            shapes: Shape of each bfloat16 tensor, by name; empty for a model whose tensors only
                transformers knows: they are those of the first update.

        """
        self.rows: list[TensorRow] = []
        start = 0
        for name, shape in shapes.items():
            num_bytes = 2 * int(np.prod(shape))
            self.rows.append((name, list(shape), start, num_bytes))
            start += num_bytes
        self._live, self._standby = self._open(start), self._open(start)
        self._is_growing = not shapes
        self._is_open = False
        self._changed: dict[str, list[np.ndarray] | None] = {}
        """By tensor, the positions written since the update was opened; None for all."""

    def _open(self, num_bytes: int) -> tuple[_MemoryFile, dict[str, np.ndarray]]:
        file = _MemoryFile(num_bytes)
        if not num_bytes:
            return file, {}
        data = np.memmap(file.path, np.uint8, "r+", shape=num_bytes)
        return file, {
            name: data[start : start + size].view(np.uint16).reshape(shape)
            for name, shape, start, size in self.rows
        }

    def begin(self) -> None:
        """Open an update that starts from the live weights."""
        # Deltas are relative to the live weights.
        for name, array in self._standby[1].items():
            array[...] = self._live[1][name]
        self._is_open, self._changed = True, {}

    def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Write tensors or patches into the standby."""
        arrays = self._open_arrays()
        for name, patch in patches.items():
            if self._is_growing and name not in arrays and isinstance(patch, np.ndarray):
                self._add(name, patch)
            array = arrays.get(name)
            if array is None:
                check_patch(name, patch, None)
            assert array is not None, "check_patch refuses unknown names"
            check_patch(name, patch, array.shape, array.dtype)
            if isinstance(patch, Patch):
                array.reshape(-1).view(patch.values.dtype)[patch.flat_indices] = patch.values
                if (before := self._changed.setdefault(name, [])) is not None:
                    before.append(patch.flat_indices.astype(np.int32))
            else:
                array[...] = patch
                self._changed[name] = None

    def _add(self, name: str, array: np.ndarray) -> None:
        """Make room for another tensor at the end of both files."""
        start = sum(num_bytes for *_, num_bytes in self.rows)
        self.rows.append((name, list(array.shape), start, array.nbytes))
        for file, arrays in (self._live, self._standby):
            file.resize(start + array.nbytes)
            arrays[name] = np.memmap(file.path, array.dtype, "r+", start, array.shape)

    def verify(self, expected: str) -> None:
        """Check the standby against the digest that its publisher announced."""
        found = root_digest(self._open_arrays())
        if found != expected:
            raise CorruptDataError(f"staged weights: expected root digest {expected}, got {found}")

    @property
    def staged_file(self) -> str:
        """Path of the standby's file, valid in this process and its children."""
        self._open_arrays()
        return self._standby[0].path

    @property
    def changes(self) -> list[TensorChange]:
        """Changes since the update was opened."""
        return [
            (name, b"" if parts is None else np.concatenate(parts).tobytes())
            for name, parts in self._changed.items()
            if parts is None or any(map(len, parts))
        ]

    def swap(self) -> None:
        """Close the update: the standby becomes the live copy."""
        self._open_arrays()
        self._live, self._standby, self._is_open = self._standby, self._live, False
        self._is_growing = False

    def starting_with(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the live tensors whose names start so."""
        return {name: each for name, each in self._live[1].items() if name.startswith(prefix)}

    def digest(self) -> str:
        """Return the root digest of the live weights."""
        return root_digest(self._live[1])

    def _open_arrays(self) -> dict[str, np.ndarray]:
        if not self._is_open:
            raise InvalidRequestError("no weight update is open; call begin_update first")
        return self._standby[1]
