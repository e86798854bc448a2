"""Rollouts that a real engine sampled from a learner's policy, and the batch of them."""

import numpy as np

from penstock.actors.generator.actor import seal_chunk
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.kernels.arrays import to_array
from penstock.messages.reward import Outcome
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.task import Sampling
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

SPARSE = PolicyConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, head_dim=16)
TEMPERATURE = 0.8


async def sample_rollout(engine, seed, num_turns=3):
    rng = np.random.default_rng(seed)
    context, turns, routes_from = np.zeros(0, np.int32), [], 0
    for index in range(num_turns):
        new = rng.integers(0, 96, 6).astype(np.int32)
        context = np.concatenate([context, new])
        sampling = Sampling(temperature=TEMPERATURE, num_tokens_max=9, seed=seed * 10 + index)
        chunks = [
            chunk
            async for chunk in engine.generate(
                context,
                sampling,
                request_id=f"{seed}-{index}",
                session_id=f"s{seed}",
                routes_from=routes_from,
            )
        ]
        sampled = np.concatenate([chunk.token_ids for chunk in chunks])
        context = np.concatenate([context, sampled])
        routes_from = context.size - 1
        turns.append(
            Turn(
                context_ids=to_array(new),
                token_ids=to_array(sampled),
                behavior_logprobs=to_array(np.concatenate([c.behavior_logprobs for c in chunks])),
                version_spans=[VersionSpan(policy_version=0, num_tokens=sampled.size)],
                stop_reason=StopReason.LENGTH,
                route_segments=seal_chunk(chunks[-1], engine.capabilities().num_experts),
                sampling=sampling,
            )
        )
    return turns


async def rollouts(learner, num_rollouts=4):
    engine = TorchEngine(learner.policy.config)
    engine.start()
    try:
        await engine.begin_update()
        state = publishable_state(learner.policy)
        await engine.apply({name: as_numpy(tensor) for name, tensor in state.items()})
        await engine.commit(0)
        return {f"r{seed}": await sample_rollout(engine, seed) for seed in range(num_rollouts)}
    finally:
        await engine.stop()


def manifest_of(turns, step=1):
    samples = [
        SampleEntry(
            rollout_id=name,
            outcome=Outcome.SOLVED if index % 2 else Outcome.FAILED,
            reward=float(index % 2),
            advantage=index % 2 - 0.5,
            version_spans=[VersionSpan(policy_version=0, num_tokens=27)],
        )
        for index, name in enumerate(turns)
    ]
    group = GroupEntry(group_id="g0", group_index=0, task_id="t", samples=samples)
    return BatchManifest(step=step, policy_version=step - 1, groups=[group])
