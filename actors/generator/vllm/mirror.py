"""The host's copy of the weights, which vLLM's worker maps and loads.

Two files of one layout: the version in use, and the one that is being staged. A commit exchanges
them, so that a version that turns out damaged changes nothing. They are in memory and have no name:
they end with the process, however it ends, and need no room in `/dev/shm`.
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
"""Name, shape, and the first byte and number of bytes in the file."""


class _MemoryFile:
    """A file of the kernel's memory; closed with the object."""

    def __init__(self, num_bytes: int) -> None:
        self._number = os.memfd_create("penstock-weights")
        os.truncate(self._number, num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._number}"

    def __del__(self) -> None:
        os.close(self._number)


class WeightMirror:
    """The double buffer. Not thread-safe: its owner runs one method at a time."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make two files of zeros.

        Args:
            shapes: Of every tensor, by name; all are bfloat16.

        """
        self.rows: list[TensorRow] = []
        start = 0
        for name, shape in shapes.items():
            num_bytes = 2 * int(np.prod(shape))
            self.rows.append((name, list(shape), start, num_bytes))
            start += num_bytes
        self._live, self._standby = self._open(start), self._open(start)
        self._is_open = False

    def _open(self, num_bytes: int) -> tuple[_MemoryFile, dict[str, np.ndarray]]:
        file = _MemoryFile(num_bytes)
        data = np.memmap(file.path, np.uint8, "r+", shape=num_bytes)
        return file, {
            name: data[start : start + size].view(np.uint16).reshape(shape)
            for name, shape, start, size in self.rows
        }

    def begin(self) -> None:
        """Open an update that starts from the live weights."""
        for name, array in self._standby[1].items():
            array[...] = self._live[1][name]
        self._is_open = True

    def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Write into the standby."""
        arrays = self._open_arrays()
        for name, patch in patches.items():
            array = arrays.get(name)
            check_patch(name, patch, None if array is None else array.shape)
            assert array is not None, "checked"
            if isinstance(patch, Patch):
                array.reshape(-1)[patch.flat_indices] = patch.values
            else:
                array[...] = patch

    def verify(self, expected: str) -> None:
        """Check the standby against the digest that its publisher announced."""
        found = root_digest(self._open_arrays())
        if found != expected:
            raise CorruptDataError(f"staged weights have root digest {found}, not {expected}")

    @property
    def staged_file(self) -> str:
        """Path of the file that is being written, for this process and those that it starts."""
        self._open_arrays()
        return self._standby[0].path

    def swap(self) -> None:
        """Close the update: the standby is live."""
        self._open_arrays()
        self._live, self._standby, self._is_open = self._standby, self._live, False

    def digest(self) -> str:
        """Return the root digest of the live weights."""
        return root_digest(self._live[1])

    def _open_arrays(self) -> dict[str, np.ndarray]:
        if not self._is_open:
            raise InvalidRequestError("no weight update is open; call begin_update first")
        return self._standby[1]
