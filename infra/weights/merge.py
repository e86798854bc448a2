"""Several deltas in a row as one, smaller than they are together.

A merge is a diff between the base and that base seen through all the deltas. It needs the base: the
places of changes are ranks among the base's elements.
"""

from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from penstock.infra.weights.diff import Advance, Summary, write_delta
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.infra.weights.files.manifest import Row
from penstock.infra.weights.files.patched import Patched
from penstock.infra.weights.files.tensors import Key, Weights
from penstock.messages.errors import CorruptDataError


def merge_deltas(
    base: Weights, paths: list[Path], output: Path, *, num_threads: int, advance: Advance
) -> Summary:
    """Write one delta that leads from `base` to where the last of `paths` leads.

    Raises:
        CorruptDataError: a delta is damaged, is not of this base, or does not follow on the one
            before.

    """
    with ExitStack() as stack:
        deltas = [stack.enter_context(DeltaFile(path)) for path in paths]
        for before, after in pairwise(deltas):
            if _table(before.manifest.target) != _table(after.manifest.base):
                raise CorruptDataError(f"{after.path}: does not follow on {before.path}")
        view = base
        for patch in deltas:
            view = Patched(view, patch, num_kept=num_threads + 2)
        return write_delta(base, view, output, num_threads=num_threads, advance=advance)


def _table(rows: tuple[Row, ...]) -> set[tuple[Key, str, tuple[int, ...], bytes]]:
    return {(row.key, row.dtype, row.shape, row.digest) for row in rows}
