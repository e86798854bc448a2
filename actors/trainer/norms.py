"""The norm of a gradient: the same bits however its tensors are cut into rows, on every device.

A row's squares are added in float64 by halving, which is elementwise and so has one order; what
rows give is added up exactly, which has none.
"""

import math
from collections.abc import Iterable

import torch

_CHUNK_ELEMENTS = 1 << 20


def row_squares(gradient: torch.Tensor) -> list[float]:
    """Return the sum of squares of each row of the first dimension; of a scalar, its square."""
    if not gradient.dim():
        gradient = gradient.unsqueeze(0)
    rows = gradient.flatten(1) if gradient.dim() > 1 else gradient.unsqueeze(1)
    if not rows.numel():
        return []
    parts = rows.split(max(1, _CHUNK_ELEMENTS // rows.shape[1]))
    return [value for part in parts for value in _halved(part.double().square_()).tolist()]


def norm(squares: Iterable[float]) -> float:
    """Return the norm of a gradient whose rows' squares these are, in any order."""
    return math.sqrt(math.fsum(squares))


def _halved(values: torch.Tensor) -> torch.Tensor:
    """Add up the rows of [R, C] -> [R]."""
    while (width := values.shape[1]) > 1:
        half = width // 2
        folded = values[:, :half] + values[:, half : 2 * half]
        if width % 2:
            folded[:, 0] += values[:, -1]
        values = folded
    return values[:, 0]
