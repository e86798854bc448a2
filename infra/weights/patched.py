"""A checkpoint behind a delta, for `apply` and for merging deltas."""

import threading
from collections import OrderedDict
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from penstock.infra.weights.coding import apply_words
from penstock.infra.weights.diff import Advance, DeltaSummary, joined, read_base, write_delta
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.infra.weights.files.manifest import TensorRow, TensorSlice
from penstock.infra.weights.files.paths import printable
from penstock.infra.weights.files.tensors import FileLayout, Key, Tensor, Weights
from penstock.messages.errors import CorruptDataError

_NAMED_MAX = 5


class PatchedWeights:
    """The target of a delta, decoded extent by extent, with a cache of `num_kept` extents."""

    def __init__(self, base: Weights, patch: DeltaFile, *, num_kept: int) -> None:
        """Check that the delta can belong to the base.

        Raises:
            CorruptDataError: The base does not have the tensors that the delta expects.

        """
        self._base, self._patch = base, patch
        self._manifest = patch.manifest
        _check_base(base, patch)
        self.is_folder = self._manifest.is_folder
        rows = self._manifest.target
        self.tensors: dict[Key, Tensor] = {row.key: row for row in rows}
        self.files = tuple(
            FileLayout(file.path, tuple(rows[row].key for row in file.rows))
            for file in self._manifest.files
        )
        self._row_starts = list(accumulate((row.num_words for row in rows), initial=0))
        self._row_numbers = {row.key: number for number, row in enumerate(rows)}
        self._starts = [
            self._row_starts[extent.row] + extent.first_word for extent in self._manifest.extents
        ]
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._num_kept = num_kept
        self._lock = threading.Lock()

    def read(self, key: Key, first: int, num_words: int) -> np.ndarray:
        """Read some words [num_words] of a tensor of the target.

        Raises:
            CorruptDataError: As in `extent`.

        """
        begin = self._row_starts[self._row_numbers[key]] + first
        end = begin + num_words
        # The last extent that starts at or before the first word.
        number = int(np.searchsorted(self._starts, begin, side="right")) - 1
        parts: list[np.ndarray] = []
        while begin < end:
            words = self._extent_kept(number)
            part = words[begin - self._starts[number] : end - self._starts[number]]
            parts.append(part)
            begin, number = begin + part.size, number + 1
        return joined(parts)

    def extent(
        self, number: int, room: np.ndarray | None = None
    ) -> tuple[list[TensorSlice], np.ndarray]:
        """Decode an extent; return its pieces, and the words of all of them in order.

        Args:
            room: Buffer for the words; by default new memory.

        Raises:
            CorruptDataError: The delta is damaged, or the base is wrong.

        """
        extent = self._manifest.extents[number]
        pieces = self._manifest.pieces(extent)
        payload = self._patch.payload(number)
        rows = [self._manifest.target[piece.row] for piece in pieces]
        base = joined([read_base(self._base, r, p) for r, p in zip(rows, pieces, strict=True)])
        try:
            out = None if room is None else room[: base.nbytes].view(base.dtype)
            return pieces, apply_words(base, payload, out)
        except CorruptDataError as error:
            raise CorruptDataError(
                f"{self._patch.path}: does not apply to this base, at {rows[0].name!r}: {error}"
            ) from error

    def _extent_kept(self, number: int) -> np.ndarray:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        # Outside of the lock, so that threads decode in parallel; two may decode the same extent.
        words = self.extent(number)[1]
        with self._lock:
            self._kept[number] = words
            while len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        return words


def _check_base(base: Weights, patch: DeltaFile) -> None:
    # Shapes and dtypes reveal most wrong bases before anything is decoded.
    expected = {row.key: (row.dtype, row.shape) for row in patch.manifest.base}
    found = {key: (tensor.dtype, tensor.shape) for key, tensor in base.tensors.items()}
    if expected != found:
        keys = {key for key, _ in expected.items() ^ found.items()}
        names = sorted(printable(name) for _, name in keys)[:_NAMED_MAX]
        raise CorruptDataError(
            f"{patch.path}: made against another base: {len(keys)} of its tensors and files are"
            f" missing there, are new, or have another dtype or shape: {', '.join(names)}"
        )


def merge_deltas(
    base: Weights, paths: list[Path], output: Path, *, num_threads: int, advance: Advance
) -> DeltaSummary:
    """Write one delta from `base` to the target of the last of `paths`.

    Raises:
        CorruptDataError: A delta is damaged, has another base, or does not follow the previous one.

    """
    with ExitStack() as stack:
        deltas = [stack.enter_context(DeltaFile(path)) for path in paths]
        for before, after in pairwise(deltas):
            if _table(before.manifest.target) != _table(after.manifest.base):
                # By names, shapes and digests of the tables; no tensor has been read yet.
                raise CorruptDataError(f"{after.path}: does not follow on {before.path}")
        view = base
        for patch in deltas:
            # As many extents as threads may read at once, and the next ones.
            view = PatchedWeights(view, patch, num_kept=num_threads + 2)
        return write_delta(base, view, output, num_threads=num_threads, advance=advance)


def _table(rows: tuple[TensorRow, ...]) -> set[tuple[Key, str, tuple[int, ...], bytes]]:
    return {(row.key, row.dtype, row.shape, row.digest) for row in rows}
