"""Cuts a batch into micro-batches, from lengths and versions alone. Pure.

So a rank can plan from a manifest before it has read any turn, and reads only what it computes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from penstock.messages.training import SampleEntry

SAMPLED_TOKENS = 512
"""Tokens on which the KL to the reference is measured where no loss needs it: the first sequences,
which belong to one group and are computed together."""


class Cuttable(Protocol):
    """A sequence whose turns may not have been read."""

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads."""
        ...

    @property
    def sampled_by(self) -> frozenset[int]:
        """Versions that sampled the trained tokens of its sample."""
        ...


S = TypeVar("S", bound=Cuttable)


class PlannedSequence(NamedTuple):
    """One sequence as a manifest describes it."""

    rollout_id: str
    num_inputs: int
    sampled_by: frozenset[int]


def planned_sequences(samples: Iterable[SampleEntry]) -> list[PlannedSequence] | None:
    """Return the sequences of samples in order; None if a manifest lacks their lengths."""
    found: list[PlannedSequence] = []
    for sample in samples:
        if not sample.num_inputs:
            return None
        versions = sampled_by(sample)
        found += [PlannedSequence(sample.rollout_id, n, versions) for n in sample.num_inputs]
    return found


def sampled_by(sample: SampleEntry) -> frozenset[int]:
    """Return the versions that sampled a sample's trained tokens."""
    return frozenset(span.policy_version for span in sample.trained_spans)


def micro_batches(sequences: Sequence[S], tokens_max: int, pairs_max: int = 0) -> list[list[S]]:
    """Cut into passes, in the given order.

    Members of a group stay adjacent, so that a pass computes their shared prefix once. A longer
    sequence gets a pass of its own.

    Args:
        sequences: of a batch.
        tokens_max: input tokens of a pass.
        pairs_max: pairs of tokens of which one attends to the other, n^2 / 2 of a sequence; 0 for
            any number.

    """
    batches: list[list[S]] = []
    room = pairs = 0
    for sequence in sequences:
        cost = sequence.num_inputs**2 // 2 if pairs_max else 0
        if not batches or sequence.num_inputs > room or cost > pairs:
            batches.append([])
            room, pairs = tokens_max, pairs_max
        batches[-1].append(sequence)
        room -= sequence.num_inputs
        pairs -= cost
    return batches


def first_sequences(sequences: Sequence[S], num_tokens: int = SAMPLED_TOKENS) -> Sequence[S]:
    """Return the shortest prefix of the sequences with at least `num_tokens` tokens, or all."""
    total = 0
    for index, sequence in enumerate(sequences):
        total += sequence.num_inputs
        if total >= num_tokens:
            return sequences[: index + 1]
    return sequences


def selections(sequences: Sequence[S], versions: Collection[int]) -> Iterator[Sequence[S]]:
    """Yield what a step cuts into passes: the batch, each kept version's part, the first."""
    yield sequences
    for version in versions:
        yield [one for one in sequences if version in one.sampled_by]
    yield first_sequences(sequences)
