"""Users are served by the real engine: its tokens and logprobs are what is recorded."""

import asyncio

import numpy as np
import openai

from penstock.actors.generator.actor import Generator
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.routes import rollout_routes
from penstock.messages.feedback import InferenceRecorded
from penstock.messages.task import Purpose

from ..conftest import Site

USER = [{"role": "user", "content": "Fix add."}]


def snapshot(config: PolicyConfig, seed: int) -> dict[str, np.ndarray]:
    state = publishable_state(Policy(config, seed=seed))
    return {name: as_numpy(tensor) for name, tensor in state.items()}


async def swap(engine: TorchEngine, config: PolicyConfig, policy_version: int) -> None:
    await engine.begin_update()
    await engine.apply(snapshot(config, seed=policy_version))
    await engine.commit(policy_version)


async def test_parallel_streams_over_a_swap_are_recorded_as_sampled(bus, tmp_path, tokenizer):
    config = PolicyConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=16,
        moe_intermediate_size=32,
        max_position_embeddings=256,
    )
    engine = TorchEngine(config, EngineOptions(num_tokens_max=256))
    engine.start()
    try:
        await swap(engine, config, 0)
        site = Site(bus, tmp_path, tokenizer)
        site.generator = Generator(engine, [Purpose.LIVE], "west", "west")
        async with (
            site.running(),
            openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="psk-test") as client,
        ):
            replies = [collect(client, seed) for seed in range(4)]
            *replies, _ = await asyncio.gather(*replies, swap(engine, config, 1))
    finally:
        await engine.stop()
    records = {record.request_id: record for record in await site.events(InferenceRecorded)}
    assert len(records) == 4
    for request_id, ids, logprobs in replies:
        turn = await site.turn(records[request_id])
        assert np.frombuffer(turn.token_ids.data, "<i4").tolist() == ids
        recorded = np.frombuffer(turn.behavior_logprobs.data, "<f4")
        np.testing.assert_array_equal(recorded, np.asarray(logprobs, np.float32))
        assert sum(span.num_tokens for span in turn.version_spans) == len(ids)
        num_inputs = turn.context_ids.shape[0] + len(ids) - 1
        assert rollout_routes([turn]).shape == (num_inputs, 2, config.num_experts_per_tok)


async def collect(client: openai.AsyncOpenAI, seed: int) -> tuple[str, list[int], list[float]]:
    stream = await client.chat.completions.create(
        model="policy",
        messages=USER,
        max_tokens=48,
        seed=seed,
        stream=True,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    ids, logprobs, name = [], [], ""
    async for chunk in stream:
        name = chunk.id
        for choice in chunk.choices:
            ids += getattr(choice, "token_ids", None) or []
            if choice.logprobs:
                logprobs += [entry.logprob for entry in choice.logprobs.content]
    return name, ids, logprobs
