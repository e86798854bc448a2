"""Bounded collections: curves, tails and medians."""

from collections.abc import Collection
from statistics import median
from typing import TypeVar

T = TypeVar("T")
NUM_POINTS_MAX = 240
NUM_SAMPLES_MAX = 4096
"""Newest values that a median is taken of."""


def append_thinned(points: list[T], point: T, num_max: int = NUM_POINTS_MAX) -> None:
    """Append; when full, drop every second point but the newest and the oldest.

    So a curve keeps its whole length, and its older part becomes coarser.
    """
    points.append(point)
    if len(points) > num_max:
        points[:] = [*points[:-1][::2], points[-1]]


def append_tail(lines: list[T], line: T, num_max: int) -> None:
    """Append and drop the oldest."""
    lines.append(line)
    if len(lines) > num_max:
        del lines[: len(lines) - num_max]


def median_or_none(values: Collection[float]) -> float | None:
    """Return the median, or None of no values."""
    return median(values) if values else None
