"""Shared memory between the trainer and its publishing ranks: a file that all of them map.

```
 trainer ── write ──▶ [ a a a b b | c c c c ] ◀── map ── rank 0, rank 1, ...
                        by dtype and name, in the order of flat coordinates
```
Each version overwrites the file, after all ranks have uploaded the version before. The file is
named after the trainer's fencing token, so that a trainer that was taken over writes to a file that
no rank reads anymore. Its contents are not needed after a restart.
"""

import os
from itertools import accumulate
from pathlib import Path

import numpy as np

from penstock.actors.policy.snapshot import Snapshot
from penstock.actors.relay.core.flat_snapshot import Table
from penstock.actors.relay.publish.spans import Layout
from penstock.actors.runtime.files import open_private, private_folder
from penstock.messages.weights import Extent


class Handover:
    """A shared file with room for one snapshot."""

    def __init__(self, folder: Path, fencing_token: int, table: Table) -> None:
        """Compute the layout, without reading or writing the file."""
        self._path = folder / f"{fencing_token:08d}"
        self._table = table
        self._elements = [*accumulate((spec.size for spec in table), initial=0)]
        self._bytes = [*accumulate((spec.num_bytes for spec in table), initial=0)]

    def write(self, snapshot: Snapshot) -> None:
        """Write all tensors.

        Raises:
            OSError: The disk has no room for the file.

        """
        # The file is allocated once; its pages are reused from version to version.
        if not self._path.exists() or self._path.stat().st_size != max(1, self._bytes[-1]):
            self._allocate()
        room = np.memmap(self._path, np.uint8, "r+")
        for spec, begin in zip(self._table, self._bytes, strict=False):
            flat = np.ascontiguousarray(snapshot[spec.name]).reshape(-1).view(np.uint8)
            room[begin : begin + spec.num_bytes] = flat

    def read(self, layout: Layout) -> list[np.ndarray]:
        """Return the bit patterns of a rank's shards, [N] each; shards of one extent are views.

        Raises:
            OSError: The file does not exist.
            ValueError: The file has the wrong size.

        """
        room = np.memmap(self._path, np.uint8, "r")
        if room.size != max(1, self._bytes[-1]):
            raise ValueError(f"{self._path}: expected {self._bytes[-1]} bytes, got {room.size}")
        shards = [[self._run(room, run) for run in runs] for runs in layout]
        return [runs[0] if len(runs) == 1 else np.concatenate(runs) for runs in shards]

    def _allocate(self) -> None:
        """Allocate the whole file, and delete the files of older tokens."""
        private_folder(self._path.parent)
        # Also one of this token with another size. A newer trainer's file is left alone.
        for old in self._path.parent.iterdir():
            if old.name <= self._path.name:
                old.unlink(missing_ok=True)
        # With a sparse file, a write to a mapped page that the disk has no room for would kill the
        # process with SIGBUS.
        try:
            with open_private(self._path, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, self._bytes[-1]))
        except OSError:
            self._path.unlink(missing_ok=True)
            raise

    def _run(self, room: np.ndarray, run: Extent) -> np.ndarray:
        """Return the bits of an extent, which may span several tensors of one dtype."""
        row = np.searchsorted(self._elements, run.start, side="right") - 1
        itemsize = self._table[row].element_type.storage.itemsize
        begin = self._bytes[row] + (run.start - self._elements[row]) * itemsize
        return room[begin : begin + run.num_elements * itemsize].view(f"u{itemsize}")
