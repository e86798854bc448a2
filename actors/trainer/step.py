"""The optimizer steps of one batch manifest.

Deterministic: the same learner, manifest, turns, settings and torch thread count give the same
bits, which is what replay proves. Logprobs are taken with the published (rounded) weights and with
the sampler's own routes; the choice of samples and their advantages come from the manifest, and
what `objective/kl_rewards.py` changes of these from the log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from penstock.actors.policy.device import fix_threads
from penstock.actors.trainer.batching.assembly import Batch
from penstock.actors.trainer.batching.manifests import (
    batch_figures,
    length_only_samples,
    length_only_weight,
    num_divided,
    staleness_tokens,
    trained_samples,
)
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner, NonFiniteError
from penstock.actors.trainer.objective.kl_rewards import with_kl_rewards
from penstock.actors.trainer.objective.losses import normalizer
from penstock.actors.trainer.passes import PassSums, take_pass
from penstock.actors.trainer.preferences.examples import PreferenceExample
from penstock.actors.trainer.preferences.objective import (
    PreferenceSums,
    referred_examples,
    take_preference_pass,
)
from penstock.actors.trainer.reference import compared
from penstock.actors.trainer.sequences import TrainingSequence
from penstock.actors.trainer.versions import published
from penstock.kernels.ops import raise_deferred_errors
from penstock.messages.rollout import Turn
from penstock.messages.training import BatchManifest, VersionDrift


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did, bit for bit."""

    weights_digest: str
    optimizer_digest: str
    metrics: dict[str, float]
    staleness_tokens: dict[int, int]
    skipped: str = ""
    """Why weights and optimizer are as before; empty where the step was taken."""
    drift: dict[int, VersionDrift] = {}
    """As `StepCompleted.drift`."""


def train_step(
    learner: Learner,
    manifest: BatchManifest,
    turns: Mapping[str, Sequence[Turn]],
    config: TrainerConfig,
    examples: Sequence[PreferenceExample] = (),
) -> StepResult:
    """Train the samples of a manifest; an empty one changes no weight.

    A batch whose loss or gradient is no finite number in some pass is skipped: weights and
    optimizer stay as they are, to the bit, and the step still counts.

    Args:
        learner: at policy version `manifest.policy_version`; changed in place.
        manifest: which samples, and with which advantages.
        turns: by rollout or request id, of every trained sample; on a rank, of those that it
            computes something of (`ranks/plan.py`).
        config: loss, correction, bounds.
        examples: of the manifest's corrections and judgments, in its order.

    Raises:
        ValueError: Turns that are malformed, or not those that the manifest counted; or a loss that
            compares with a reference, of which the learner knows nothing.
        KeyError: Turns that are missing.

    """
    fix_threads(config.num_threads)
    learner.policy.checkpoints_activations = config.activation_checkpointing
    batch = Batch.gathered(learner, trained_samples(manifest), turns, config)
    sequences = _weighed(manifest, batch.sequences)
    num_kept = config.num_versions_kept
    left_behind = published(learner.parameters) if num_kept else {}
    passes, norms, skipped = [], [], ""
    preferences = PreferenceSums()
    if sequences or examples:
        before = _copy_of(learner) if config.num_passes > 1 else {}
        try:
            referred = referred_examples(learner, examples, config)
            passes, norms, preferences = _take_passes(
                learner, manifest, sequences, referred, config
            )
        except NonFiniteError as error:
            skipped = str(error)
            if before:
                learner.load_state(before)
    learner.versions.keep(manifest.policy_version, left_behind, num_kept)
    sums = passes[0] if passes else PassSums()
    return StepResult(
        weights_digest=learner.weights_digest(),
        optimizer_digest=learner.optimizer_digest(),
        metrics=sums.figures()
        | _pass_figures(passes, norms, config)
        | batch_figures(manifest)
        | batch.figures()
        | preferences.figures(),
        staleness_tokens={} if skipped else staleness_tokens(manifest),
        skipped=skipped,
        drift={version: of.drift() for version, of in sorted(sums.live.items())},
    )


def _take_passes(
    learner: Learner,
    manifest: BatchManifest,
    sequences: Sequence[TrainingSequence],
    examples: Sequence[PreferenceExample],
    config: TrainerConfig,
) -> tuple[list[PassSums], list[float], PreferenceSums]:
    """Take the optimizer steps; return what each pass showed, and the norm of its gradient.

    Of corrections and judgments, what the first pass showed.

    Raises:
        NonFiniteError: In some pass; those before it have changed the learner.

    """
    # A version cut by time has what little there is: it moves the policy as little as that.
    num_of_epoch = config.epoch.num_samples if config.epoch else 0
    divisor = normalizer(max(num_divided(manifest), num_of_epoch), config.loss)
    version = manifest.policy_version
    batch = compared(learner, sequences, config) if sequences else []
    if config.loss.kl.where == "reward":
        batch = with_kl_rewards(manifest, batch, config)
    passes: list[PassSums] = []
    norms: list[float] = []
    seen: list[PreferenceSums] = []
    for _ in range(config.num_passes):
        passes.append(take_pass(learner, batch, version, config, divisor))
        if examples:
            seen.append(take_preference_pass(learner, examples, config))
        raise_deferred_errors()  # Before the weights take what a bad value gave.
        norms.append(learner.apply(manifest.step, config.optimizer, config.steps_max))
        if len(passes) == 1:
            batch = [
                replace(sequence, proximal_logprobs=logprobs)
                for sequence, logprobs in zip(batch, passes[0].current, strict=True)
            ]
    return passes, norms, seen[0] if seen else PreferenceSums()


def _copy_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state().items()}


def _weighed(
    manifest: BatchManifest, sequences: Sequence[TrainingSequence]
) -> list[TrainingSequence]:
    """Return sequences, those of groups beside the batch with the weight of these."""
    beside, weight = length_only_samples(manifest), length_only_weight(manifest)
    return [replace(one, weight=weight) if one.rollout_id in beside else one for one in sequences]


def _pass_figures(
    passes: Sequence[PassSums], norms: Sequence[float], config: TrainerConfig
) -> dict[str, float]:
    """Return what the passes show together; all other figures are of the first one."""
    num_passes, num_tokens = len(passes), sum(one.mismatch.total.num_tokens for one in passes)
    if not num_passes:
        return {"loss": 0.0, "grad_norm": 0.0}
    return {
        "loss": sum(one.loss for one in passes) / num_passes,
        "grad_norm": norms[0],
        "grad_norm_max": max(norms),
        "grad_clipped": sum(norm > config.optimizer.grad_clip for norm in norms) / num_passes,
        "clipped_fraction": sum(one.num_clipped for one in passes) / max(num_tokens, 1.0),
        **passes[-1].moved.divergences("passes"),
    }
