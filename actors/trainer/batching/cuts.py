"""Which sequences of a batch are computed together: follows from lengths and versions alone. Pure.

So a rank can plan from a manifest, before it has read a turn, and reads what it computes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from penstock.messages.training import SampleEntry

SAMPLED_TOKENS = 512
"""Where KL to the reference costs nothing, it is measured on the first sequences of a batch, of
about so many tokens: they are a group's, and computed together."""


class Cuttable(Protocol):
    """A sequence, read or not."""

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads."""
        ...

    @property
    def sampled_by(self) -> frozenset[int]:
        """The versions that sampled what is trained of its sample."""
        ...


S = TypeVar("S", bound=Cuttable)


class PlannedSequence(NamedTuple):
    """One sequence as a manifest describes it."""

    rollout_id: str
    num_inputs: int
    sampled_by: frozenset[int]


def planned_sequences(samples: Iterable[SampleEntry]) -> list[PlannedSequence] | None:
    """Return the sequences of samples, in order; None where a manifest does not say how long."""
    found: list[PlannedSequence] = []
    for sample in samples:
        if not sample.num_inputs:
            return None
        versions = sampled_by(sample)
        found += [PlannedSequence(sample.rollout_id, n, versions) for n in sample.num_inputs]
    return found


def sampled_by(sample: SampleEntry) -> frozenset[int]:
    """Return the versions that sampled what is trained of a sample."""
    return frozenset(span.policy_version for span in sample.trained_spans)


def micro_batches(sequences: Sequence[S], tokens_max: int) -> list[list[S]]:
    """Cut into passes of at most `tokens_max` input tokens, in the order given.

    A group's members stay side by side, so that a pass computes what they share once. A longer
    sequence goes alone.
    """
    batches: list[list[S]] = []
    room = 0
    for sequence in sequences:
        if not batches or sequence.num_inputs > room:
            batches.append([])
            room = tokens_max
        batches[-1].append(sequence)
        room -= sequence.num_inputs
    return batches


def first_sequences(sequences: Sequence[S], num_tokens: int = SAMPLED_TOKENS) -> Sequence[S]:
    """Return as many sequences as it takes to have so many tokens, or all."""
    total = 0
    for index, sequence in enumerate(sequences):
        total += sequence.num_inputs
        if total >= num_tokens:
            return sequences[: index + 1]
    return sequences


def selections(sequences: Sequence[S], versions: Collection[int]) -> Iterator[Sequence[S]]:
    """Yield what a step cuts into passes: the batch, what each kept version sampled, the first."""
    yield sequences
    for version in versions:
        yield [one for one in sequences if version in one.sampled_by]
    yield first_sequences(sequences)
