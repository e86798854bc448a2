"""Which rank computes which pass, and reads what. Pure, and alike on all ranks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.actors.trainer.batching.cuts import micro_batches, planned_sequences, selections
from penstock.messages.training import SampleEntry


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


def read_samples(
    samples: Sequence[SampleEntry],
    versions: Iterable[int],
    bounds: tuple[int, int],
    rank: int,
    num_ranks: int,
) -> list[SampleEntry]:
    """Return the samples of which a rank computes something: those whose turns it reads.

    Args:
        samples: that a step trains or measures, in order. Where some do not say how long they are,
            every rank reads all.
        versions: kept ones, under which a step measures what they sampled.
        bounds: tokens and pairs of one pass, as `micro_batches` takes them.
        rank: this one.
        num_ranks: of all.

    """
    plan = planned_sequences(samples)
    if plan is None:
        return list(samples)
    found: set[str] = set()
    for selection in selections(plan, list(versions)):
        passes = micro_batches(selection, *bounds)
        for turn in rounds(len(passes), num_ranks):
            found |= {one.rollout_id for one in passes[turn.index(rank)]}
    return [sample for sample in samples if sample.rollout_id in found]
