"""Measures how far the policy has moved since a live sample was drawn: when it is too old to train.

Feedback takes seconds or days, and versions are made at any pace meanwhile, so a sample's age in
steps says nothing. What counts is how the probabilities of its tokens have changed: the correction
keeps the gradient right while ratios are moderate, and has nothing left to train with once a few
tokens carry all the weight or the policy has moved away from the reply. Measured when a batch is
proposed and recorded in its manifest, so that replay decides nothing.
"""

from collections.abc import Mapping, Sequence

import msgspec
import torch

from penstock.actors.policy.device import fix_threads
from penstock.actors.trainer.batching.assembly import Batch
from penstock.actors.trainer.config import LiveConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner, published
from penstock.actors.trainer.objective.corrections import correction_weights
from penstock.actors.trainer.objective.ratios import Ratios, log_ratios
from penstock.actors.trainer.reference import logprobs_under
from penstock.messages.rollout import Turn
from penstock.messages.training import BatchManifest, SampleEntry


class OffPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Distance between one live sample and the policy that is to train it."""

    ess: float
    """Effective sample size (sum w)^2 / (N sum w^2) over its N tokens; w are the correction's
    weights."""
    ratio: float
    """Geometric mean of the tokens' probabilities now over those when they were sampled."""

    def is_stale(self, config: LiveConfig) -> bool:
        """Return whether the correction has too little left to train with."""
        is_near = config.ratio_min <= self.ratio <= 1.0 / config.ratio_min
        return self.ess < config.ess_min or not is_near


def is_older(sample: SampleEntry, policy_version: int) -> bool:
    """Return whether another version sampled some of the sample's tokens."""
    return any(span.policy_version != policy_version for span in sample.version_spans)


def recorded(manifest: BatchManifest, measured: Mapping[str, OffPolicy]) -> BatchManifest:
    """Return a manifest with the measurements of its live samples."""
    live = [
        msgspec.structs.replace(sample, ess=figures.ess, ratio=figures.ratio)
        if (figures := measured.get(sample.rollout_id))
        else sample
        for sample in manifest.live
    ]
    return msgspec.structs.replace(manifest, live=live)


def measure(
    learner: Learner,
    samples: Sequence[SampleEntry],
    turns: Mapping[str, Sequence[Turn]],
    config: TrainerConfig,
) -> dict[str, OffPolicy]:
    """Measure how far the learner's policy has moved from each sample's.

    Args:
        learner: Learner; unchanged.
        samples: Trainable live samples.
        turns: Turns of each sample; on a rank, of the samples it computes.
        config: Settings of the step that is to train them.

    Returns:
        The measurement of each sample, by id.

    """
    fix_threads(config.num_threads)
    sequences = Batch.gathered(learner, samples, turns, config).sequences
    found: dict[str, list[torch.Tensor]] = {}
    now = logprobs_under(learner, published(learner.parameters), sequences, config)
    for sequence, logprobs in zip(sequences, now, strict=True):
        pair = (torch.from_numpy(logprobs), torch.from_numpy(sequence.behavior_logprobs))
        found.setdefault(sequence.rollout_id, []).append(log_ratios(*pair))
    return {name: _distance(torch.cat(parts), config) for name, parts in found.items()}


def _distance(log_ratio: torch.Tensor, config: TrainerConfig) -> OffPolicy:
    ids = torch.zeros(log_ratio.numel(), dtype=torch.int64)
    weights = correction_weights(Ratios.unmeasured(log_ratio), ids, config.loss).double()
    square = float((weights * weights).sum()) * weights.numel()
    return OffPolicy(
        ess=float(weights.sum()) ** 2 / square if square else 0.0,
        ratio=float(log_ratio.double().mean().exp()),
    )
