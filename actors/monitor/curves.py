"""Bounded collections for views: thinned curves, tails and medians."""

from collections.abc import Collection
from statistics import median
from typing import TypeVar

T = TypeVar("T")
NUM_POINTS_MAX = 240
"""Largest number of points in a curve."""
NUM_SAMPLES_MAX = 4096
"""Number of newest values from which a median is computed."""


def append_thinned(points: list[T], point: T, num_max: int = NUM_POINTS_MAX) -> None:
    """Append a point; when full, drop every second point except the oldest and the newest.

    The curve keeps its whole length, and its older part becomes coarser.
    """
    points.append(point)
    if len(points) > num_max:
        points[:] = [*points[:-1][::2], points[-1]]


def append_tail(lines: list[T], line: T, num_max: int) -> None:
    """Append a line; drop the oldest ones beyond `num_max`."""
    lines.append(line)
    if len(lines) > num_max:
        del lines[: len(lines) - num_max]


def median_or_none(values: Collection[float]) -> float | None:
    """Return the median, or None without values."""
    return median(values) if values else None
