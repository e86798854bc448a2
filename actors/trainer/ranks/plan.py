"""Which rank computes which pass: a function of the number of passes and of ranks alone."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Round:
    """One pass on each rank: rank r has pass `first + r`."""

    first: int
    num_active: int
    """Ranks that have one, from rank 0; the others run along for the collective operations."""

    def is_active(self, rank: int) -> bool:
        """Whether a rank has a pass of its own."""
        return rank < self.num_active

    def index(self, rank: int) -> int:
        """Return which pass a rank computes; without one of its own, the first again."""
        return self.first + rank if self.is_active(rank) else self.first


def rounds(num_passes: int, num_ranks: int) -> Iterator[Round]:
    """Yield the rounds of passes 0 .. `num_passes` - 1, each pass once and in order."""
    for first in range(0, num_passes, num_ranks):
        yield Round(first=first, num_active=min(num_ranks, num_passes - first))
