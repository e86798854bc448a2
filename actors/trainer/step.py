"""One optimizer step from one batch manifest.

Deterministic: the same learner, manifest, turns, settings and torch thread count give the same
bits, which is what replay proves. Logprobs are taken with the published (rounded) weights and with
the sampler's own routes; advantages and the choice of samples come from the manifest alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import torch

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.batching.manifests import (
    batch_figures,
    staleness_tokens,
    trained_samples,
)
from penstock.actors.trainer.config import LossConfig, TrainerConfig
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.gradients import accumulate
from penstock.actors.trainer.learner import Learner, NonFiniteError
from penstock.actors.trainer.objective.losses import (
    correction_weights,
    log_ratios,
    normalizer,
    token_losses,
)
from penstock.actors.trainer.objective.mismatch import MismatchSums, mismatch_sums, sums_by_version
from penstock.actors.trainer.routes import route_bytes
from penstock.actors.trainer.sequences import (
    TrainingSequence,
    micro_batches,
    num_exact_prefixes,
    sample_sequences,
)
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


@dataclass(kw_only=True)
class _Sums:
    loss: float = 0.0
    logprob: float = 0.0
    num_inputs: int = 0
    router_mismatch: float = 0.0
    mismatch: MismatchSums = field(default_factory=MismatchSums)
    live: dict[int, MismatchSums] = field(default_factory=dict[int, MismatchSums])
    """Users' tokens by the version that sampled them; the weights are the ratios themselves."""

    def add(self, other: "_Sums") -> None:
        """Add another micro-batch."""
        self.loss += other.loss
        self.logprob += other.logprob
        self.num_inputs += other.num_inputs
        self.router_mismatch += other.router_mismatch
        self.mismatch.add(other.mismatch)
        for version, sums in other.live.items():
            self.live.setdefault(version, MismatchSums()).add(sums)


def train_step(
    learner: Learner,
    manifest: BatchManifest,
    turns: Mapping[str, Sequence[Turn]],
    config: TrainerConfig,
) -> StepResult:
    """Train the samples of a manifest; an empty one changes no weight.

    A batch whose loss or gradient is no finite number is skipped: weights and optimizer stay as
    they are, to the bit, and the step still counts.

    Args:
        learner: at policy version `manifest.policy_version`; changed in place.
        manifest: which samples, and with which advantages.
        turns: by rollout or request id, of every trained sample.
        config: loss, correction, bounds.

    Raises:
        ValueError: Turns that are malformed, or not those that the manifest counted.
        KeyError: Turns that are missing.

    """
    torch.set_num_threads(config.num_threads)
    sequences = list(_sequences(manifest, turns, learner.policy.config, config))
    sums, norm, skipped = _Sums(), 0.0, ""
    if sequences:
        try:
            # A version cut by time has what little there is: it moves the policy as little as that.
            num_of_epoch = config.epoch.num_samples if config.epoch else 0
            num_samples = max(len(trained_samples(manifest)), num_of_epoch)
            divisor = normalizer(num_samples, config.loss)
            sums = _accumulate(learner, sequences, config, divisor)
            raise_deferred_errors()  # Before the weights take what a bad value gave.
            norm = learner.apply(manifest.step, config.optimizer, config.steps_max)
        except NonFiniteError as error:
            sums, norm, skipped = _Sums(), 0.0, str(error)
    return StepResult(
        weights_digest=learner.weights_digest(),
        optimizer_digest=learner.optimizer_digest(),
        metrics=_figures(sums, norm)
        | batch_figures(manifest)
        | {"route_bytes": float(_route_bytes(manifest, turns))}
        | _session_figures(manifest, turns),
        staleness_tokens={} if skipped else staleness_tokens(manifest),
        skipped=skipped,
        drift={version: of.drift() for version, of in sorted(sums.live.items())},
    )


def _sequences(
    manifest: BatchManifest,
    turns: Mapping[str, Sequence[Turn]],
    policy: PolicyConfig,
    config: TrainerConfig,
) -> Iterator[TrainingSequence]:
    for sample in trained_samples(manifest):
        name = sample.rollout_id
        found = sample_sequences(sample, turns[name], policy, config.live.weight)
        num_expected = sum(span.num_tokens for span in sample.version_spans)
        num_found = sum(sequence.is_trained.size for sequence in found)
        if num_found != num_expected:
            raise ValueError(
                f"rollout {name}: the manifest of step {manifest.step} counts {num_expected} "
                f"tokens, its turns have {num_found}"
            )
        if sample.num_turns and len(sample.version_spans) == 1:
            version = sample.version_spans[0].policy_version
            found = [replace(sequence, live_version=version) for sequence in found]
        yield from found


def _session_figures(
    manifest: BatchManifest, turns: Mapping[str, Sequence[Turn]]
) -> dict[str, float]:
    """Return the share of live turns after the first whose context continues the one before."""
    live = [turns[sample.rollout_id] for sample in trained_samples(manifest) if sample.num_turns]
    num_later = sum(len(each) - 1 for each in live)
    if not num_later:
        return {}
    return {"live_exact_prefixes": sum(map(num_exact_prefixes, live)) / num_later}


def _route_bytes(manifest: BatchManifest, turns: Mapping[str, Sequence[Turn]]) -> int:
    return sum(route_bytes(turns[sample.rollout_id]) for sample in trained_samples(manifest))


def _accumulate(
    learner: Learner, sequences: Sequence[TrainingSequence], config: TrainerConfig, divisor: float
) -> _Sums:
    """Leave the batch's gradient in the learner's parameters; return its figures."""
    total = _Sums()
    with learner.published_weights():
        forward = SequenceForward(learner.policy)
        passes = [
            partial(_forward, forward, batch, config.loss, divisor)
            for batch in micro_batches(sequences, config.micro_batch_tokens)
        ]
        for sums in accumulate(
            list(learner.parameters.values()),
            passes,
            num_workers=config.num_workers,
            num_threads=config.num_threads,
        ):
            total.add(sums)
    if not math.isfinite(total.loss):
        learner.clear()
        raise NonFiniteError(f"the loss is {total.loss}")
    return total


def _forward(
    forward: SequenceForward, batch: Sequence[TrainingSequence], config: LossConfig, divisor: float
) -> tuple[torch.Tensor, _Sums]:
    """Return the loss of one micro-batch, and its figures."""
    counts = torch.tensor([sequence.sampled_at.size for sequence in batch])
    behavior = _cat([sequence.behavior_logprobs for sequence in batch])
    forwarded = forward.run(batch)
    current = forwarded.logprobs
    ids = torch.arange(len(batch)).repeat_interleave(counts)
    ratio = log_ratios(current, behavior)
    weights = correction_weights(ratio, ids, config)
    advantages = _cat([sequence.advantages for sequence in batch])
    losses = token_losses(current, behavior, advantages, weights, config)
    loss = (losses * _per_token([sequence.weight for sequence in batch], counts)).sum() / divisor
    num_inputs = sum(sequence.num_inputs for sequence in batch)
    sums = _Sums(
        loss=float(loss.detach()),
        logprob=float(current.detach().double().sum()),
        num_inputs=num_inputs,
        router_mismatch=forwarded.router_mismatch * num_inputs,
        mismatch=mismatch_sums(ratio, weights),
        live=sums_by_version([one.live_version for one in batch], ratio.split(counts.tolist())),
    )
    return loss, sums


def _cat(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _per_token(values: Sequence[float], counts: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)


def _figures(sums: _Sums, norm: float) -> dict[str, float]:
    num_tokens = max(sums.mismatch.num_tokens, 1.0)
    return {
        "loss": sums.loss,
        "grad_norm": norm,
        "logprob_mean": sums.logprob / num_tokens,
        "tokens_trained": sums.mismatch.num_tokens,
        "tokens_read": float(sums.num_inputs),
        "router_mismatch": sums.router_mismatch / max(sums.num_inputs, 1),
        **sums.mismatch.figures(),
    }
