"""Adapters on their way to an engine: small deltas, and no wrong one stays unnoticed."""

import msgspec
import numpy as np
import pytest
import torch
from tests.contract.test_engine_conformance import DENSE, OPTIONS
from tests.sim.sync.test_sync_probe import Site, StaleDecoder, probe_of, sample

from penstock.actors.generator import core
from penstock.actors.generator.engine import EngineNotReadyError
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.adapter import PREFIX
from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.probe import NUM_PROMPTS
from penstock.actors.relay.replica.receiver import QuarantinedError
from penstock.messages.weights import WeightsApplied

CONFIG = msgspec.structs.replace(DENSE, adapter=AdapterConfig(rank=2, alpha=4.0))
STEP = 2e-3
"""What a version adds to every value of B."""


def version_of(number, config=CONFIG):
    """Base, A, and the B of a version: 0 has none, as at a run's start."""
    policy = Policy(config, seed=1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith(".b"):
                generator = torch.Generator().manual_seed(len(name))
                signs = torch.randint(2, parameter.shape, generator=generator) * 2.0 - 1.0
                parameter.add_(signs, alpha=STEP * number)
            elif parameter.dim() > 1 and not name.endswith(".a"):
                parameter.mul_(5.0)
    return {name: as_numpy(tensor) for name, tensor in publishable_state(policy).items()}


class Unloaded:
    """What a decoder makes of a policy whose adapters never arrive, or have another scale."""

    def __init__(self, prepare, scale):
        self.prepare, self.scale = prepare, scale

    def __call__(self, policy):
        config = policy.config
        adapter = msgspec.structs.replace(config.adapter, alpha=self.scale * config.adapter.rank)
        policy.config = msgspec.structs.replace(config, adapter=adapter)
        try:
            return self.prepare(policy)
        finally:
            policy.config = config


SABOTAGE = {
    "not loaded": lambda prepare: Unloaded(prepare, 1e-30),
    "alpha as scale": lambda prepare: Unloaded(prepare, 4.0),
    "half the scale": lambda prepare: Unloaded(prepare, 1.0),
    "old version": StaleDecoder,
}


@pytest.fixture(params=["native", "torch"])
async def site(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(core.NativeDecoder, "load", lambda *_: None)
    engine = TorchEngine(CONFIG, OPTIONS)
    if request.param not in engine.capabilities().name:
        pytest.skip("no C compiler")
    site = Site(engine, CONFIG)
    await site.relay.start(site.context)
    engine.start()
    yield site
    await engine.stop()


async def test_only_adapters_travel_after_the_first_version(site):
    base = version_of(0)
    num_adapters = sum(each.size for name, each in base.items() if name.startswith(PREFIX))
    assert num_adapters < sum(each.size for each in base.values()) / 10
    for number in range(4):
        weights = version_of(number)
        (applied,) = await site.publish(number, weights)
        assert applied.probe_matches and applied.digest_matches
        expected = probe_of(weights, CONFIG)
        np.testing.assert_allclose(applied.probe, expected[:NUM_PROMPTS], atol=1e-5)
        if number:
            assert np.abs(np.subtract(expected[:NUM_PROMPTS], expected[NUM_PROMPTS:])).max() > 1e-4
            assert applied.num_bytes < 4 * num_adapters
    versions: list[int] = []
    await sample(site.engine, versions)
    assert set(versions) == {3}


@pytest.mark.parametrize("kind", SABOTAGE)
async def test_a_sabotaged_adapter_is_refused_with_its_first_version(site, kind, monkeypatch):
    await site.publish(0, version_of(0))
    await site.publish(1, version_of(1))
    decoder = site.engine._core.decoder
    wrong = SABOTAGE[kind](decoder.prepare)
    if kind == "old version":
        wrong(site.engine._weights._live)
        wrong.num_sabotaged = 2
    monkeypatch.setattr(decoder, "prepare", wrong)
    with pytest.raises(QuarantinedError, match="other values than the trainer at version 2"):
        await site.publish(2, version_of(2))
    (applied,) = [e for e in site.context.published if isinstance(e, WeightsApplied)]
    assert applied.digest_matches and not applied.probe_matches
    with pytest.raises(EngineNotReadyError):
        await sample(site.engine, [])


@pytest.mark.parametrize("kind", ["not loaded", "alpha as scale"])
async def test_so_is_one_that_an_engine_starts_with(site, kind, monkeypatch):
    decoder = site.engine._core.decoder
    monkeypatch.setattr(decoder, "prepare", SABOTAGE[kind](decoder.prepare))
    with pytest.raises(QuarantinedError, match="other values than the trainer at version 0"):
        await site.publish(0, version_of(1))
