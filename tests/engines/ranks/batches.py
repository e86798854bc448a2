"""Batches of random rollouts with recorded routes, the same for a seed in every process."""

import numpy as np
import torch

from penstock.actors.policy.config import PolicyConfig
from penstock.kernels.arrays import to_array
from penstock.kernels.route_segments import seal_routes
from penstock.messages.reward import Outcome
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.task import Sampling
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

NUM_ROLLOUTS, NUM_SAMPLED = 7, 12
"""An odd number, so that ranks have different numbers of passes."""


def rollouts(config: PolicyConfig, seed: int) -> dict[str, list[Turn]]:
    """Rollouts of two turns; the first tokens of all are the same, routed alike."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, config.vocab_size, 20)
    prompt_routes = _routes(config, rng, 20)
    return {
        f"r{index}": _turns(config, rng, prompt, prompt_routes, index)
        for index in range(NUM_ROLLOUTS)
    }


def _turns(config, rng, prompt, prompt_routes, index):
    turns = []
    for number in range(2):
        context = prompt if number == 0 else rng.integers(0, config.vocab_size, 5 + index)
        sampled = rng.integers(0, config.vocab_size, NUM_SAMPLED)
        own = _routes(config, rng, len(context) + NUM_SAMPLED)
        if number == 0:
            own[: len(prompt_routes)] = prompt_routes
        first = 0 if number == 0 else len(prompt) + NUM_SAMPLED - 1
        routes = own[:-1] if number == 0 else own  # the last sampled token was not read yet
        sealed = []
        if not config.is_dense:
            routed = torch.from_numpy(routes.astype(np.int16))
            facts = {"num_experts": config.num_experts, "policy_version": 0}
            sealed = [seal_routes(routed, first_position=first, **facts)]
        logprobs = rng.normal(-np.log(config.vocab_size), 0.05, NUM_SAMPLED)
        turns.append(
            Turn(
                context_ids=to_array(context.astype(np.int32)),
                token_ids=to_array(sampled.astype(np.int32)),
                behavior_logprobs=to_array(logprobs.astype(np.float32)),
                version_spans=[VersionSpan(policy_version=0, num_tokens=NUM_SAMPLED)],
                stop_reason=StopReason.LENGTH,
                route_segments=sealed,
                sampling=Sampling(temperature=1.0, num_tokens_max=NUM_SAMPLED, seed=index),
            )
        )
    return turns


def _routes(config, rng, num_tokens):
    shape = (num_tokens, config.num_hidden_layers)
    chosen = [
        rng.permutation(config.num_experts)[: config.num_experts_per_tok]
        for _ in range(shape[0] * shape[1])
    ]
    return np.array(chosen).reshape(*shape, config.num_experts_per_tok)


def manifest(turns: dict[str, list[Turn]], step: int) -> BatchManifest:
    """One group of them all."""
    spans = [VersionSpan(policy_version=0, num_tokens=2 * NUM_SAMPLED)]
    samples = [
        SampleEntry(
            rollout_id=name,
            outcome=Outcome.SOLVED if index % 2 else Outcome.FAILED,
            reward=float(index % 2),
            advantage=index % 2 - 3 / 7,
            version_spans=spans,
        )
        for index, name in enumerate(turns)
    ]
    group = GroupEntry(group_id="g0", group_index=0, task_id="t", samples=samples)
    return BatchManifest(step=step, policy_version=step - 1, groups=[group])
