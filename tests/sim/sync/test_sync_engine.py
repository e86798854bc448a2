"""The torch engine, updated while it generates."""

import asyncio

import numpy as np
import pytest
import torch
from tests.sim.sync.world import FakeContext

from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.region.relay import Relay
from penstock.actors.relay.replica.receiver import Receiver
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.digest import root_digest
from penstock.messages.task import Sampling
from penstock.messages.weights import WeightsRelayed

NUM_VERSIONS = 4
CONFIG = PolicyConfig(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=16,
    moe_intermediate_size=32,
    max_position_embeddings=256,
)
OPTIONS = EngineOptions(
    num_running_max=2,
    num_parked_max=2,
    num_waiting_max=2,
    num_tokens_max=200,
    prefill_tokens_max=32,
)


@pytest.fixture
async def engine():
    engine = TorchEngine(CONFIG, OPTIONS)
    engine.start()
    yield engine
    await engine.stop()


def snapshots():
    """Yield what a trainer with float32 masters would publish."""
    policy = Policy(CONFIG, seed=1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(NUM_VERSIONS):
        yield {name: as_numpy(tensor) for name, tensor in publishable_state(policy).items()}
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 1e-4)


async def test_updates_land_in_flight_and_every_token_knows_its_version(engine):
    context = FakeContext(MemoryStore())
    local = MemoryStore()
    publisher = Publisher(StoreIO(context.store))
    relay, receiver = Relay("west", local), Receiver("west", "0", local, engine)
    await relay.start(context)
    versions: list[int] = []
    tasks = []
    for version, snapshot in enumerate(snapshots()):
        manifest = await publisher.prepare(
            version, snapshot, optimizer_step=version, config_json="{}"
        )
        await relay.on_weights_published(manifest, context)
        relayed = WeightsRelayed(region="west", policy_version=version, num_bytes=0, fetch_ms=0.0)
        (applied,) = await receiver.on_weights_relayed(relayed, context)
        assert applied.root_digest == await engine.digest() == root_digest(snapshot)
        assert engine.health().policy_version == version
        if version == 0:
            tasks.append(asyncio.create_task(_generate(engine, versions)))
    await asyncio.gather(*tasks)
    assert versions == sorted(versions)
    assert set(versions) <= set(range(NUM_VERSIONS))
    assert context.gauges["digest_mismatches"] == 0


async def _generate(engine, versions):
    sampling = Sampling(num_tokens_max=120, seed=3)
    prompt = np.arange(5, 15, dtype=np.int32)
    async for chunk in engine.generate(prompt, sampling, request_id="r"):
        versions += [chunk.policy_version] * len(chunk.token_ids)


async def test_no_token_is_sampled_under_a_mix_of_two_versions(engine):
    """Half an update changes no bit of what is sampled; a whole one leaves none of the old."""
    old, new = list(snapshots())[:2]
    fresh = TorchEngine(CONFIG, OPTIONS)
    fresh.start()
    try:
        for target, snapshot in ((engine, old), (fresh, new)):
            await target.begin_update()
            await target.apply(snapshot)
            await target.commit(int(target is fresh), root_digest(snapshot))
        undisturbed = await _sampled(engine, "before", lambda number: None)
        names = sorted(new)

        async def write_some(number):
            await engine.apply({name: new[name] for name in names[number % 4 :: 4]})

        await engine.begin_update()
        assert await _sampled(engine, "during", write_some) == undisturbed
        await engine.apply(new)
        await engine.commit(1, root_digest(new))
        assert await engine.digest() == await fresh.digest()
        expected = await _sampled(fresh, "fresh", lambda number: None)
        after = await _sampled(engine, "after", lambda number: None)
        assert after == expected != undisturbed
        assert {version for _, _, version in after} == {1}
    finally:
        await fresh.stop()


async def _sampled(engine, request_id, between):
    """Return (token, log-probability, version) of every token; do something between chunks."""
    sampling = Sampling(num_tokens_max=40, seed=3)
    prompt = np.arange(5, 15, dtype=np.int32)
    tokens = []
    number = 0
    async for chunk in engine.generate(prompt, sampling, request_id=request_id):
        logprobs = chunk.behavior_logprobs.tolist()
        tokens += [
            (int(token), logprob, chunk.policy_version)
            for token, logprob in zip(chunk.token_ids, logprobs, strict=True)
        ]
        if (doing := between(number)) is not None:
            await doing
        number += 1
    return tokens
