"""Where the part of a tensor that a rank holds lies in flat coordinates."""

from collections.abc import Sequence

import numpy as np

from penstock.actors.relay.core.flat_snapshot import Table
from penstock.messages.errors import NotFoundError
from penstock.messages.weights import Extent


def find_runs(table: Table, name: str, box: Sequence[slice]) -> list[Extent]:
    """Return where a box of a tensor lies in flat coordinates, in C order.

    Example: rows 2 and 3 of a [4, 8] tensor are one run, its last two columns four.

    Args:
        table: Table of the whole snapshot.
        name: Name of the tensor.
        box: A slice of step 1 for each of the leading dimensions; the others are whole.

    Raises:
        NotFoundError: No such tensor.
        ValueError: More slices than dimensions, or a slice of another step.

    """
    start = 0
    for spec in table:
        if spec.name == name:
            break
        start += spec.size
    else:
        raise NotFoundError(f"tensor {name}: not in the table")
    if any(part.step not in {None, 1} for part in box):
        raise ValueError(f"tensor {name}: expected slices of step 1, got {[*box]}")
    slices = [*box, *[slice(None)] * (len(spec.shape) - len(box))]
    bounds = [part.indices(size) for part, size in zip(slices, spec.shape, strict=True)]
    counts = [max(0, end - begin) for begin, end, _ in bounds]
    strides = [int(np.prod(spec.shape[axis + 1 :])) for axis in range(len(counts))]
    cut_axes = [axis for axis, size in enumerate(spec.shape) if counts[axis] != size]
    axis = max(cut_axes, default=0)
    length = int(np.prod(counts[axis:]))
    first = start + sum(low * step for (low, _, _), step in zip(bounds, strides, strict=True))
    steps = (sum(map(int.__mul__, place, strides)) for place in np.ndindex(tuple(counts[:axis])))
    return [Extent(first + step, length) for step in steps if length]
