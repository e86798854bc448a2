"""An engine that computes other values than the trainer serves nothing until that is mended."""

import asyncio

import numpy as np
import pytest
import torch
from tests.contract.test_engine_conformance import CONFIG, OPTIONS, weights_of
from tests.sim.sync.world import FakeContext

from penstock.actors.generator.engine import EngineNotReadyError
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, load_published
from penstock.actors.policy.model import Policy
from penstock.actors.policy.probe import NUM_DIFFERING_MAX, check_probe, probe_policy
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.region.relay import Relay
from penstock.actors.relay.replica.receiver import QuarantinedError, Receiver
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import CorruptDataError
from penstock.messages.task import Sampling
from penstock.messages.weights import WeightsApplied, WeightsRelayed

SAMPLING = Sampling(num_tokens_max=150, seed=3)
PROMPT = np.arange(5, 15, dtype=np.int32)


def probe_of(weights, config=CONFIG):
    policy = Policy(config)
    load_published(
        policy, {n: torch.from_numpy(w).view(PUBLISHED_DTYPE) for n, w in weights.items()}
    )
    return probe_policy(policy)


class Site:
    """A trainer's store, a region, and an engine that follows."""

    def __init__(self, engine, config=CONFIG):
        self.engine = engine
        self.config = config
        self.context = FakeContext(MemoryStore())
        self.publisher = Publisher(StoreIO(self.context.store))
        local = MemoryStore()
        self.relay = Relay("west", local)
        self.receiver = Receiver("west", "0", local, engine)

    async def publish(self, version, weights):
        manifest = await self.publisher.prepare(
            version,
            weights,
            optimizer_step=version,
            config_json="{}",
            probe=probe_of(weights, self.config),
        )
        await self.relay.on_weights_published(manifest, self.context)
        relayed = WeightsRelayed(region="west", policy_version=version, num_bytes=0, fetch_ms=0.0)
        return await self.receiver.on_weights_relayed(relayed, self.context)


class StaleDecoder:
    """Computes with what it made of an older policy, as often as it is sabotaged."""

    def __init__(self, prepare):
        self.prepare = prepare
        self.held = None
        self.num_sabotaged = 0

    def __call__(self, policy):
        if self.num_sabotaged:
            self.num_sabotaged -= 1
        else:
            self.held = self.prepare(policy)
        return self.held


@pytest.fixture
async def site(monkeypatch):
    engine = TorchEngine(CONFIG, OPTIONS)
    site = Site(engine)
    site.stale = StaleDecoder(engine._core.decoder.prepare)
    monkeypatch.setattr(engine._core.decoder, "prepare", site.stale)
    await site.relay.start(site.context)
    engine.start()
    yield site
    await engine.stop()


async def sample(engine, versions):
    async for chunk in engine.generate(PROMPT, SAMPLING, request_id="r"):
        versions += [chunk.policy_version] * len(chunk.token_ids)


async def test_the_engine_computes_what_the_trainer_does(site):
    for version in range(2):
        weights = weights_of(version)
        (applied,) = await site.publish(version, weights)
        np.testing.assert_allclose(applied.probe, probe_of(weights), atol=1e-5)
        assert applied.probe_matches


async def test_no_token_of_a_sabotaged_reload_gets_out_and_a_whole_one_mends_it(site):
    await site.publish(0, weights_of(0))
    versions: list[int] = []
    await site.engine.pause()
    task = asyncio.create_task(sample(site.engine, versions))
    await asyncio.sleep(0)
    site.stale.num_sabotaged = 1
    (applied,) = await site.publish(1, weights_of(1))
    assert applied.probe_matches and applied.policy_version == 1
    with pytest.raises(EngineNotReadyError, match="failed their probe"):
        await task
    assert not versions
    await site.engine.resume()
    await sample(site.engine, versions)
    assert set(versions) == {1}
    assert site.context.gauges["digest_mismatches"] == 1


async def test_an_engine_that_stays_wrong_is_quarantined(site):
    await site.publish(0, weights_of(0))
    site.stale.num_sabotaged = 2
    with pytest.raises(QuarantinedError, match="other values than the trainer at version 1"):
        await site.publish(1, weights_of(1))
    (wrong,) = [e for e in site.context.published if isinstance(e, WeightsApplied)]
    assert wrong.digest_matches and not wrong.probe_matches
    assert not site.engine.health().ready
    with pytest.raises(EngineNotReadyError):
        await sample(site.engine, [])


def test_some_values_may_differ_and_numbers_must_be_numbers():
    expected = [-1.0] * 16
    off = [-2.0] * NUM_DIFFERING_MAX
    check_probe(off + expected[len(off) :], expected, 1e-3, 0)
    check_probe([-9.0] * 16, [], 1e-3, 0)
    for found in ([-2.0] * 16, [float("nan")] * 16):
        with pytest.raises(CorruptDataError, match="16 of 16 probe values"):
            check_probe(found, expected, 1e-3, 0)
