"""vLLM's own LoRA behind the engine: what the trainer computes, and no wrong adapter unnoticed."""

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.contract.check_engine import STOP_ID, collect, prompt
from tests.contract.test_engine_conformance import tokenizer
from tests.engines import test_vllm_engine
from tests.engines.test_vllm_engine import OPTIONS, SHAPES
from tests.sim.sync.test_sync_adapter import version_of
from tests.sim.sync.test_sync_probe import probe_of

from penstock.actors.generator.vllm.engine import VllmEngine
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, load_published
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.actors.policy.probe import NUM_PROMPTS
from penstock.kernels.digest import root_digest
from penstock.messages.errors import CorruptDataError
from penstock.messages.task import Sampling

pytestmark = test_vllm_engine.pytestmark
ADAPTED = {
    name: msgspec.structs.replace(SHAPES["dense"], adapter=adapter)
    for name, adapter in {
        "all": AdapterConfig(rank=2, alpha=4.0),
        "some": AdapterConfig(rank=9, alpha=9.0, targets=("v_proj", "up_proj")),
    }.items()
}


async def commit(engine, number, config):
    """Load a version as a receiver does: the adapters alone, once the base is there."""
    weights = version_of(number, config)
    changed = weights
    if engine.health().policy_version >= 0 and engine.health().ready:
        before = version_of(engine.health().policy_version, config)
        changed = {n: w for n, w in weights.items() if not np.array_equal(w, before[n])}
    await engine.begin_update()
    await engine.apply(changed)
    await engine.commit(number, root_digest(weights), probe_of(weights, config))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ADAPTED)
async def started(request):
    config = ADAPTED[request.param]
    engine = VllmEngine(config, OPTIONS, tokenizer(), [STOP_ID])
    await engine.start()
    yield engine, config
    await engine.stop()


async def test_tokens_are_sampled_under_every_versions_adapter(started):
    engine, config = started
    for number in range(3):
        weights = version_of(number, config)
        await commit(engine, number, config)
        expected = probe_of(weights, config)
        np.testing.assert_allclose(engine.probe(), expected[:NUM_PROMPTS], atol=1e-4)
        policy = Policy(config)
        state = {n: torch.from_numpy(w).view(PUBLISHED_DTYPE) for n, w in weights.items()}
        load_published(policy, state)
        reply = await collect(engine, prompt(21), Sampling(seed=1, num_tokens_max=50))
        ids = torch.tensor([*prompt(21).tolist(), *reply.token_ids])
        with torch.no_grad():
            output = policy(ids[:-1], [len(ids) - 1])
            logprobs = token_logprobs(policy.logits(output.hidden), ids[1:])
        np.testing.assert_allclose(reply.logprobs, logprobs[-50:], atol=1e-4)
        assert set(reply.versions) == {number}


@pytest.mark.parametrize("kind", ["not loaded", "old version", "another scale"])
async def test_a_sabotaged_adapter_is_refused(started, kind, monkeypatch):
    engine, config = started
    await commit(engine, 1, config)
    client = engine._client

    async def nothing(folder):
        if kind == "not loaded":
            client._lora = None
            await client._llm.remove_lora(1)

    if kind == "another scale":
        scaled = msgspec.structs.replace(config.adapter, alpha=config.adapter.alpha / 2)
        wrong = msgspec.structs.replace(config, adapter=scaled)
        monkeypatch.setattr(engine, "_config", wrong)
    else:
        monkeypatch.setattr(client, "load_adapter", nothing)
    # vLLM itself refuses the probe's requests for an adapter that it does not have.
    with pytest.raises(Exception if kind == "not loaded" else CorruptDataError):
        await commit(engine, 2, config)
    assert not engine.health().ready
    monkeypatch.undo()
    await commit(engine, 2, config)
    assert engine.health().ready
