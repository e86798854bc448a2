"""Differences between the logprobs of a trainer and of the sampler, and the layer they start in."""

import time
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.actors.policy.exact import ExactForward, LogprobRequest
from penstock.actors.policy.model import Policy
from penstock.actors.policy.packing import pack_tree
from penstock.actors.trainer.batching.cuts import micro_batches
from penstock.infra.mismatch.rollouts import Rollouts
from penstock.infra.mismatch.trainers import TrainerForward

_PASS_TOKENS = 2048


class MismatchMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Mismatch of one trainer with the sampler, over sampled tokens."""

    tokens: int
    kl_k1: float
    """mean(-log r), r = trainer / sampler probability."""
    kl_k3: float
    """mean(r - 1 - log r)."""
    logprob_abs_diff_max: float
    logprob_abs_diff_p99: float
    ratio_above_2: float
    """Share of tokens with r above 2 or below 1/2."""
    flips_per_layer: list[float]
    """Share of expert slots, by layer, with an expert that the sampler did not use."""
    forward_s: float
    """CPU time of all passes in seconds."""


@torch.no_grad()
def measure(trainer: TrainerForward, rollouts: Rollouts, policy_version: int) -> MismatchMetrics:
    """Measure a trainer with the weights of `policy_version` on the tokens that it sampled."""
    differences: list[np.ndarray] = []
    flips: list[np.ndarray] = []
    slots, elapsed_s = 0, 0.0
    versions = iter(rollouts.versions)
    for batch in micro_batches(rollouts.sequences, _PASS_TOKENS):
        started = time.process_time()
        forwarded = trainer(batch)
        elapsed_s += time.process_time() - started
        behavior = np.concatenate([sequence.behavior_logprobs for sequence in batch])
        drawn = np.concatenate([next(versions) for _ in batch]) == policy_version
        current = forwarded.logprobs.numpy().astype(np.float64)
        differences.append((current - behavior)[drawn])
        # As sets: the order of experts within a token's slots does not matter.
        is_other = forwarded.used[..., None] != forwarded.recorded[:, :, None, :]
        flips.append(is_other.all(-1).sum((0, 2)))
        slots += forwarded.recorded[:, 0].size
    log_ratio = np.concatenate(differences)
    size = np.abs(log_ratio)
    return MismatchMetrics(
        tokens=log_ratio.size,
        # 0.0 - x and not -x, which would print as -0.
        kl_k1=float(0.0 - log_ratio.mean()),
        kl_k3=float((np.expm1(log_ratio) - log_ratio).mean()),
        logprob_abs_diff_max=float(size.max()),
        logprob_abs_diff_p99=float(np.quantile(size, 0.99)),
        ratio_above_2=float((size > np.log(2.0)).mean()),
        flips_per_layer=(np.sum(flips, axis=0) / max(slots, 1)).tolist(),
        forward_s=elapsed_s,
    )


@torch.no_grad()
def first_difference(policy: Policy, rollouts: Rollouts) -> dict[str, Any] | None:
    """Find the first layer whose output differs from the sampler's, in the policy's mode.

    Returns:
        `layer`, `token`, `unit` and `abs_diff` of the first difference, and `abs_diff_max` of its
        layer; None if nothing differs.

    """
    # The longest sequence has the most sums that may differ.
    sequence = max(rollouts.sequences, key=lambda each: each.num_inputs)
    tree = pack_tree([sequence.token_ids[:-1]], [sequence.routed_experts])
    rows, targets = np.arange(sequence.num_inputs), sequence.token_ids[1:]
    exact = ExactForward(policy).run(tree, LogprobRequest.plain(rows, targets))
    states: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _layer, _args, output: states.append(output[0]))
        for layer in policy.layers
    ]
    replays = policy.config.numerics.replays
    routes = torch.as_tensor(tree.routed_experts) if replays else None
    policy(torch.as_tensor(tree.input_ids), tree.lengths, routes, tree.parents)
    for hook in hooks:
        hook.remove()
    for index, (state, expected) in enumerate(zip(states, exact.states, strict=True)):
        difference = (state - expected).abs()
        if difference.max() > 0:
            token, unit = divmod(int((difference > 0).flatten().int().argmax()), state.shape[1])
            return {
                "layer": index,
                "token": token,
                "unit": unit,
                "abs_diff": float(difference[token, unit]),
                "abs_diff_max": float(difference.max()),
            }
    return None
