"""KL to the reference in the reward: each rollout pays for its distance from version 0.

The k1 estimate over all trained tokens of a rollout is subtracted from its reward before its
group's advantages are estimated, so that every token of the rollout shares the cost (Composer 2,
arXiv 2603.24477). It uses the logprobs of the policy that sampled, which are on the log. A rollout
without trained tokens counts with the mean of the others in its group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.objective.advantages import dr_grpo, estimator
from penstock.actors.trainer.objective.kl import reward_changes
from penstock.actors.trainer.sequences import TrainingSequence
from penstock.messages.reward import Outcome
from penstock.messages.training import BatchManifest, SampleEntry, TrunkCredit


def with_kl_rewards(
    manifest: BatchManifest, sequences: Sequence[TrainingSequence], config: TrainerConfig
) -> list[TrainingSequence]:
    """Return the sequences with changed advantages.

    All live samples of a batch form one group. Tokens of a shared trunk count for each of its
    branches and get their mean.

    Args:
        sequences: All sequences of the step, with `reference_logprobs`; a sample's are in order.

    """
    by_sample: dict[str, list[TrainingSequence]] = {}
    for sequence in sequences:
        by_sample.setdefault(sequence.rollout_id, []).append(sequence)
    k1 = {name: np.concatenate([_k1(one) for one in parts]) for name, parts in by_sample.items()}
    coefficient, estimate = config.loss.kl.coefficient, estimator(config.estimator)
    changes: dict[str, float] = {}
    trunks: dict[str, TrunkCredit] = {}
    for group in manifest.groups:
        counted = [sample for sample in group.samples if _counts(sample)]
        nats = _nats([sample for sample in counted if sample.rollout_id in k1], k1)
        mean = sum(nats.values()) / max(len(nats), 1)
        # The mean leaves the group's baseline where it was.
        given = [nats.get(one.rollout_id, mean) for one in counted]
        values = reward_changes([one.reward for one in counted], given, coefficient, estimate)
        changes |= {
            one.rollout_id: value
            for one, value in zip(counted, values, strict=True)
            if one.rollout_id in nats
        }
        trunks |= {one.rollout_id: one.trunk for one in counted if one.trunk}
    nats = {one.rollout_id: float(k1[one.rollout_id].sum()) for one in manifest.live
            if one.rollout_id in k1}  # fmt: skip
    values = reward_changes([0.0] * len(nats), list(nats.values()), coefficient, dr_grpo)
    changes |= dict(zip(nats, values, strict=True))
    return [
        one
        for name, parts in by_sample.items()
        for one in _changed(parts, changes, trunks.get(name))
    ]


def _counts(sample: SampleEntry) -> bool:
    # Withheld samples are not trained, but their rewards are in their group's baseline.
    return sample.outcome.is_trained or sample.outcome is Outcome.WITHHELD


def _k1(sequence: TrainingSequence) -> np.ndarray:
    """Return k1 of all M sampled tokens, float64 [M]; 0 for forced and withheld ones."""
    assert sequence.reference_logprobs is not None
    found = np.zeros(sequence.is_trained.size)
    found[sequence.is_trained] = sequence.behavior_logprobs - sequence.reference_logprobs
    return found


def _nats(samples: Sequence[SampleEntry], k1: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the sum over each rollout, including the trunk that it branched off."""
    nats = {sample.rollout_id: float(k1[sample.rollout_id].sum()) for sample in samples}
    for sample in samples:
        if sample.trunk:
            shared = float(k1[sample.rollout_id][: sample.trunk.num_tokens].sum())
            for name in sample.trunk.branches:
                if name != sample.rollout_id and name in nats:
                    nats[name] += shared
    return nats


def _changed(
    parts: Sequence[TrainingSequence], changes: Mapping[str, float], trunk: TrunkCredit | None
) -> list[TrainingSequence]:
    own = changes[parts[0].rollout_id]
    values = np.full(sum(one.is_trained.size for one in parts), own, np.float32)
    if trunk is not None:
        shared = [changes[name] for name in trunk.branches if name in changes]
        values[: trunk.num_tokens] = sum(shared) / len(shared)
    found: list[TrainingSequence] = []
    start = 0
    for one in parts:
        added = values[start : start + one.is_trained.size][one.is_trained]
        found.append(replace(one, advantages=one.advantages + added))
        start += one.is_trained.size
    return found
