"""The optimizer steps of one batch manifest, pass by pass.

Deterministic: the same learner, manifest, turns, settings and torch thread count give the same
bits, which replay verifies. Logprobs are computed with the published (rounded) weights and the
sampler's own routes. The choice of samples and their advantages come from the manifest; only
`objective/kl_rewards.py` changes advantages, from what the log holds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import torch

from penstock.actors.policy.device import fix_threads
from penstock.actors.trainer.batching.assembly import Batch
from penstock.actors.trainer.batching.cuts import micro_batches
from penstock.actors.trainer.batching.manifests import (
    batch_figures,
    length_only_samples,
    length_only_weight,
    num_divided,
    staleness_tokens,
    trained_samples,
)
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.learner import Learner, NonFiniteError, published
from penstock.actors.trainer.objective.corrections import correction_weights
from penstock.actors.trainer.objective.kl import k1, k3
from penstock.actors.trainer.objective.kl_rewards import with_kl_rewards
from penstock.actors.trainer.objective.losses import (
    LossTokens,
    corrected_ratios,
    normalizer,
    token_losses,
)
from penstock.actors.trainer.objective.mismatch import MismatchSums, RatioSums, sums_by_version
from penstock.actors.trainer.objective.ratios import Ratios, log_ratios
from penstock.actors.trainer.preferences.examples import PreferenceExample
from penstock.actors.trainer.preferences.objective import (
    PreferenceSums,
    referred_examples,
    take_preference_pass,
)
from penstock.actors.trainer.reference import compared
from penstock.actors.trainer.sequences import TrainingSequence
from penstock.messages.rollout import Turn
from penstock.messages.training import BatchManifest, VersionDrift


@dataclass(kw_only=True)
class PassSums:
    """Sums over the N tokens of a pass, or of a part of it."""

    loss: float = 0.0
    logprob: float = 0.0
    entropy: float = 0.0
    num_clipped: float = 0.0
    """Tokens at which the loss's own clipping took effect."""
    reference_k1: float = 0.0
    reference_k3: float = 0.0
    num_referenced: int = 0
    """Tokens whose distance to the reference policy was measured."""
    live_k3: float = 0.0
    num_live: int = 0
    """Live tokens, whose distance to the version that served them is measured."""
    num_inputs: int = 0
    router_mismatch: float = 0.0
    mismatch: MismatchSums = field(default_factory=MismatchSums.empty)
    moved: RatioSums = field(default_factory=RatioSums)
    """Ratios of the policy in this pass to the policy in the first pass."""
    live: dict[int, RatioSums] = field(default_factory=dict[int, RatioSums])
    """Ratios of live tokens, by the version that sampled them."""
    current: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """Logprobs of each sequence, float32 [N], in order."""

    def add(self, other: "PassSums") -> None:
        """Add the sums of the next part."""
        self.loss += other.loss
        self.logprob += other.logprob
        self.entropy += other.entropy
        self.num_clipped += other.num_clipped
        self.reference_k1 += other.reference_k1
        self.reference_k3 += other.reference_k3
        self.num_referenced += other.num_referenced
        self.live_k3 += other.live_k3
        self.num_live += other.num_live
        self.num_inputs += other.num_inputs
        self.router_mismatch += other.router_mismatch
        self.mismatch.add(other.mismatch)
        self.moved.add(other.moved)
        for version, sums in other.live.items():
            self.live.setdefault(version, RatioSums()).add(sums)
        self.current += other.current

    def figures(self) -> dict[str, float]:
        """Return the metrics of one pass over a batch."""
        num_tokens = max(self.mismatch.total.num_tokens, 1.0)
        figures = {
            "logprob_mean": self.logprob / num_tokens,
            "entropy": self.entropy / num_tokens,
            "tokens_trained": self.mismatch.total.num_tokens,
            "tokens_read": float(self.num_inputs),
            "router_mismatch": self.router_mismatch / max(self.num_inputs, 1),
            **self.mismatch.figures(),
        }
        if self.num_referenced:
            figures["kl_reference"] = self.reference_k1 / self.num_referenced
            figures["kl_reference_k3"] = self.reference_k3 / self.num_referenced
        if self.num_live:
            figures["live_kl"] = self.live_k3 / self.num_live
        return figures


def take_pass(
    learner: Learner,
    sequences: Sequence[TrainingSequence],
    policy_version: int,
    config: TrainerConfig,
    divisor: float,
) -> PassSums:
    """Leave the batch's gradient in the learner's parameters; return the sums of the pass.

    Args:
        learner: Learner; its weights stay as they are.
        sequences: Batch, with `proximal_logprobs` from the second pass on.
        policy_version: Version that the step trains.
        config: Settings of the step.
        divisor: Divisor of the summed token losses.

    Raises:
        NonFiniteError: The loss is not finite; no gradient is left.

    """
    total = PassSums()
    version_measured = policy_version if learner.versions.have_sampled else None
    with learner.published_weights():
        forward = learner.forward()
        passes = [
            partial(_forward, forward, batch, version_measured, config, divisor)
            for batch in micro_batches(
                sequences, config.micro_batch_tokens, config.micro_batch_pairs
            )
        ]
        for sums in learner.accumulate(
            passes, num_workers=config.num_workers, num_threads=config.num_threads
        ):
            total.add(sums)
    if not math.isfinite(total.loss):
        learner.clear()
        raise NonFiniteError(f"the loss is {total.loss}")
    return total


def _forward(
    forward: SequenceForward,
    batch: Sequence[TrainingSequence],
    version_measured: int | None,
    config: TrainerConfig,
    divisor: float,
) -> tuple[torch.Tensor, PassSums]:
    """Compute the loss of one micro-batch, and its sums."""
    loss_config = config.loss
    counts = torch.tensor([sequence.sampled_at.size for sequence in batch])
    has_bonus = loss_config.entropy_bonus > 0
    forwarded = forward.run(batch, "gradient" if has_bonus else "value")
    current = forwarded.logprobs
    behavior = _cat([sequence.behavior_logprobs for sequence in batch])
    proximal = _proximal(batch, current)
    ids = torch.arange(len(batch)).repeat_interleave(counts)
    ratios = _ratios(batch, current, proximal, version_measured, config)
    tokens = LossTokens(
        current=current,
        proximal=proximal,
        behavior=behavior,
        advantages=_cat([sequence.advantages for sequence in batch]),
        weights=correction_weights(ratios, ids, loss_config),
        sequence_ids=ids,
    )
    losses = token_losses(tokens, loss_config)
    values = losses.values
    entropy = forwarded.entropies
    if loss_config.entropy_bonus:
        values = values - loss_config.entropy_bonus * entropy
    reference = _cat([_or_nan(one, one.reference_logprobs) for one in batch])
    if loss_config.kl.where == "loss":
        values = values + loss_config.kl.coefficient * k3(current, reference)
    is_live = _per_token([float(sequence.is_live) for sequence in batch], counts)
    served = k3(behavior, current) * is_live
    if config.live.kl_coefficient:
        values = values + config.live.kl_coefficient * served
    loss = (values * _per_token([sequence.weight for sequence in batch], counts)).sum() / divisor
    num_inputs = sum(sequence.num_inputs for sequence in batch)
    detached = current.detach()
    is_referenced = ~reference.isnan()
    # float64, so that the sums of many small distances keep their digits.
    distance = (detached[is_referenced].double(), reference[is_referenced].double())
    return loss, PassSums(
        loss=float(loss.detach()),
        logprob=float(detached.double().sum()),
        entropy=float(entropy.detach().double().sum()),
        num_clipped=float(losses.is_clipped.sum()),
        reference_k1=float(k1(*distance).sum()),
        reference_k3=float(k3(*distance).sum()),
        num_referenced=int(is_referenced.sum()),
        live_k3=float(served.detach().double().sum()),
        num_live=int(is_live.sum()),
        num_inputs=num_inputs,
        router_mismatch=forwarded.router_mismatch * num_inputs,
        mismatch=MismatchSums.of(ratios, tokens.weights),
        moved=RatioSums.of(log_ratios(current, proximal)),
        live=sums_by_version(
            [one.live_version for one in batch], ratios.total.split(counts.tolist())
        ),
        current=[part.numpy() for part in detached.split(counts.tolist())],
    )


def _ratios(
    batch: Sequence[TrainingSequence],
    current: torch.Tensor,
    proximal: torch.Tensor,
    version_measured: int | None,
    config: TrainerConfig,
) -> Ratios:
    """Return ratios of trainer to sampler, with the engine's share where it is known."""
    behavior = _cat([sequence.behavior_logprobs for sequence in batch])
    total = corrected_ratios(current, proximal, behavior, config.loss)
    is_own = _cat([one.versions == version_measured for one in batch])
    before = _cat([_or_nan(one, one.engine_logprobs) for one in batch])
    # The engine's share can be measured only at the version that sampled the token: this one, or an
    # earlier one whose weights were kept.
    at_version = torch.where(is_own, proximal, before)
    is_measured = ~at_version.isnan()
    engine = log_ratios(torch.where(is_measured, at_version, behavior), behavior)
    return Ratios(total=total, engine=engine, is_measured=is_measured)


def _proximal(batch: Sequence[TrainingSequence], current: torch.Tensor) -> torch.Tensor:
    """Return the logprobs [N] that ratios compare with; in the first pass, the policy's own."""
    known = [one.proximal_logprobs for one in batch if one.proximal_logprobs is not None]
    return _cat(known) if known else current.detach()


def _or_nan(sequence: TrainingSequence, logprobs: np.ndarray | None) -> np.ndarray:
    if logprobs is not None:
        return logprobs
    return np.full(sequence.sampled_at.size, np.nan, np.float32)


def _cat(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _per_token(values: Sequence[float], counts: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a step, identical bit for bit in a replay."""

    weights_digest: str
    optimizer_digest: str
    metrics: dict[str, float]
    staleness_tokens: dict[int, int]
    skipped: str = ""
    """Why weights and optimizer are unchanged; empty if the step was taken."""
    drift: dict[int, VersionDrift] = {}
    """Drift of live samples by version, as in `StepCompleted.drift`."""


def train_step(
    learner: Learner,
    manifest: BatchManifest,
    turns: Mapping[str, Sequence[Turn]],
    config: TrainerConfig,
    examples: Sequence[PreferenceExample] = (),
) -> StepResult:
    """Train the samples of a manifest; an empty one changes no weight.

    A batch whose loss or gradient is not finite in some pass is skipped: weights and optimizer stay
    as they are, to the bit, and the step still counts.

    Args:
        learner: Learner at policy version `manifest.policy_version`; changed in place.
        manifest: Samples and their advantages.
        turns: Turns of each trained sample by rollout or request id; on a rank, only of the
            samples it computes (`ranks/plan.py`).
        config: Loss, correction and bounds.
        examples: Corrections and judgments of the manifest, in its order.

    Raises:
        ValueError: Turns are malformed or not those that the manifest counted, or the loss
            needs a reference that the learner lacks.
        KeyError: Turns are missing.

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
        # A single pass fails before the optimizer runs, so only several passes need a copy to
        # restore.
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
    """Take the optimizer steps; return the sums and gradient norm of each pass.

    Preference sums are those of the first pass.

    Raises:
        NonFiniteError: A pass was not finite; the passes before it have changed the learner.

    """
    # A time-triggered version may hold few samples; its step is scaled accordingly.
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
    """Return the sequences, with the weight of length-only samples applied."""
    beside, weight = length_only_samples(manifest), length_only_weight(manifest)
    return [replace(one, weight=weight) if one.rollout_id in beside else one for one in sequences]


def _pass_figures(
    passes: Sequence[PassSums], norms: Sequence[float], config: TrainerConfig
) -> dict[str, float]:
    """Return metrics over all passes; every other metric describes the first pass."""
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
