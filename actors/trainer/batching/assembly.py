"""Assembles the training sequences of a batch, each read by the process that computes it.

```
turns of this process's samples ─▶ sequences ─┬──────────────────────▶ the batch, in order
                          other ranks ─▶ outlines ─┴─ gathered, by sample ─┘
```
An outline holds what a step needs of a sequence computed elsewhere: no tokens and no routes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.batching.cuts import sampled_by
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.routes import route_bytes
from penstock.actors.trainer.sequences import TrainingSequence, sample_sequences
from penstock.kernels.arrays import from_array
from penstock.messages.rollout import Turn
from penstock.messages.training import SampleEntry


@dataclass(frozen=True, kw_only=True)
class ReadSample:
    """Sequences of a sample, and statistics of its turns."""

    sequences: list[TrainingSequence]
    num_route_bytes: int
    num_later: int = 0
    """Turns of a live sample that continue a segment."""
    num_continued: int = 0
    """Continuing turns whose context begins with all tokens of the turn before."""

    def outline(self) -> "ReadSample":
        """Return the sample without what only the computing process needs."""
        return replace(self, sequences=[sequence.outline() for sequence in self.sequences])


class Batch:
    """Samples of a step in manifest order."""

    def __init__(self, samples: Sequence[ReadSample]) -> None:
        self._samples = samples

    @classmethod
    def gathered(
        cls,
        learner: Learner,
        samples: Sequence[SampleEntry],
        turns: Mapping[str, Sequence[Turn]],
        config: TrainerConfig,
    ) -> "Batch":
        """Return a batch that the learner's processes read together; each of them calls this.

        Args:
            learner: Learner of this process.
            samples: All samples, in order.
            turns: Turns of the samples that this process computes, by sample name.
            config: Settings of the step.

        Raises:
            ValueError: Turns are malformed or not those that the manifest counted.
            KeyError: No process has a sample's turns.

        """
        policy = learner.policy.config
        own = {
            sample.rollout_id: _read(sample, turns[sample.rollout_id], policy, config)
            for sample in samples
            if sample.rollout_id in turns
        }
        outlines = learner.gather({name: one.outline() for name, one in own.items()})
        # Own sequences win over gathered outlines of the same samples.
        known = {name: one for part in outlines for name, one in part.items()} | own
        return cls([known[sample.rollout_id] for sample in samples])

    @property
    def sequences(self) -> list[TrainingSequence]:
        """All sequences; those computed by other processes are outlines."""
        return [sequence for sample in self._samples for sequence in sample.sequences]

    def figures(self) -> dict[str, float]:
        """Return the metrics that follow from the turns alone."""
        found = {"route_bytes": float(sum(one.num_route_bytes for one in self._samples))}
        if num_later := sum(one.num_later for one in self._samples):
            num_continued = sum(one.num_continued for one in self._samples)
            found["live_exact_prefixes"] = num_continued / num_later
        return found


def _read(
    sample: SampleEntry,
    turns: Sequence[Turn],
    policy: PolicyConfig,
    config: TrainerConfig,
) -> ReadSample:
    """Read one sample; raises as `Batch.gathered`."""
    found = sample_sequences(sample, turns, policy, config.live.weight)
    # Advantages were computed for the tokens that the manifest counts; other turns would train them
    # on something else.
    num_expected = sum(span.num_tokens for span in sample.version_spans)
    num_found = sum(sequence.is_trained.size for sequence in found)
    if num_found != num_expected:
        raise ValueError(
            f"rollout {sample.rollout_id}: the manifest counts {num_expected} tokens, its turns "
            f"have {num_found}"
        )
    lengths = [sequence.num_inputs for sequence in found]
    if sample.num_inputs and sample.num_inputs != lengths:
        raise ValueError(
            f"rollout {sample.rollout_id}: the manifest has sequences of {sample.num_inputs} "
            f"inputs, its turns of {lengths}"
        )
    found = [replace(sequence, sampled_by=sampled_by(sample)) for sequence in found]
    if not sample.num_turns:
        return ReadSample(sequences=found, num_route_bytes=route_bytes(turns))
    spans = sample.version_spans
    live_version = spans[0].policy_version if len(spans) == 1 else None
    found = [replace(each, is_live=True, live_version=live_version) for each in found]
    return ReadSample(
        sequences=found,
        num_route_bytes=route_bytes(turns),
        num_later=sum(not turn.starts_segment for turn in turns[1:]),
        num_continued=num_exact_prefixes(turns),
    )


def num_exact_prefixes(turns: Sequence[Turn]) -> int:
    """Count a session's turns whose context begins with all tokens of the turn before."""
    ids = [np.concatenate([from_array(t.context_ids), from_array(t.token_ids)]) for t in turns]
    contexts = [from_array(turn.context_ids) for turn in turns]
    return sum(
        np.array_equal(context[: before.size], before)
        for before, context in zip(ids, contexts[1:], strict=False)
    )
