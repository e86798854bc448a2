"""Logprobs of sampled tokens under the weights of earlier versions.

A step compares the policy with two kinds of versions: the reference, which is version 0, and the
versions that sampled its tokens, of which the newest are kept (`TrainerConfig.versions_kept`).
Weights are as published: what generators had. Which versions are kept follows from steps and
settings alone, and checkpoints carry the recent ones, so training, resumed training and replay
compare with the same weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.actors.trainer.batching.cuts import first_sequences, micro_batches
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner, Weights
from penstock.actors.trainer.sequences import TrainingSequence


def compared(
    learner: Learner, sequences: Sequence[TrainingSequence], config: TrainerConfig
) -> list[TrainingSequence]:
    """Return sequences with the logprobs of the reference and of the versions that sampled them.

    Args:
        learner: Learner; unchanged.
        sequences: Sequences of a batch.
        config: Settings of the step.

    Raises:
        ValueError: The loss needs a reference, and the learner has none.

    """
    found = list(sequences)
    recent = learner.versions.recent if learner.versions.have_sampled else {}
    for version, weights in recent.items():
        at = [i for i, one in enumerate(found) if version in one.sampled_by]
        chosen = [found[i] for i in at]
        logprobs = logprobs_under(learner, weights, chosen, config) if chosen else []
        for i, values in zip(at, logprobs, strict=True):
            found[i] = _with_engine(found[i], values, version)
    return _with_reference(learner, found, config)


def _with_engine(
    sequence: TrainingSequence, logprobs: np.ndarray, version: int
) -> TrainingSequence:
    known = sequence.engine_logprobs
    before = np.full(logprobs.shape, np.nan, np.float32) if known is None else known
    merged = np.where(sequence.versions == version, logprobs, before)
    return replace(sequence, engine_logprobs=merged)


def _with_reference(
    learner: Learner, sequences: list[TrainingSequence], config: TrainerConfig
) -> list[TrainingSequence]:
    weights, is_needed = learner.versions.reference, config.loss.kl.where != "none"
    if weights is None:
        if is_needed:
            raise ValueError("trainer.loss.kl: the weights of version 0 are not there")
        return sequences
    chosen = sequences if is_needed else first_sequences(sequences)
    logprobs = logprobs_under(learner, weights, chosen, config)
    found = [
        replace(sequence, reference_logprobs=values)
        for sequence, values in zip(chosen, logprobs, strict=True)
    ]
    return found + sequences[len(found) :]


def logprobs_under(
    learner: Learner,
    weights: Weights,
    sequences: Sequence[TrainingSequence],
    config: TrainerConfig,
) -> list[np.ndarray]:
    """Return the logprobs of each sequence, float32 [N], under other weights.

    Args:
        learner: Learner whose policy computes; unchanged.
        weights: Published weights of a version.
        sequences: Sequences as sampled.
        config: Bounds and threads of a pass.

    """
    with learner.computing_with(weights):
        forward = learner.forward()

        def run(batch: Sequence[TrainingSequence]) -> list[np.ndarray]:
            logprobs = forward.run(batch).logprobs
            parts = logprobs.split([one.sampled_at.size for one in batch])
            return [part.numpy() for part in parts]

        batches = micro_batches(sequences, config.micro_batch_tokens, config.micro_batch_pairs)
        found = learner.run_all(
            [partial(run, batch) for batch in batches],
            num_workers=config.num_workers,
            num_threads=config.num_threads,
        )
    return [each for parts in found for each in parts]
