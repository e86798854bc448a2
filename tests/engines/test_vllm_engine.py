"""vLLM as an engine, in its own environment: `make test-engines`."""

import asyncio
import importlib.util
from functools import cache, partial

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.contract.check_engine import STOP_ID, collect, load, prompt
from tests.contract.check_engine_settings import CHECKS
from tests.contract.test_engine_conformance import CONFIG, DENSE, tokenizer, weights_of
from tests.sim.sync.test_sync_probe import Site, probe_of

from penstock.actors.generator.actor import Generator
from penstock.actors.generator.engine import EngineNotReadyError
from penstock.actors.generator.vllm.engine import VllmEngine
from penstock.actors.generator.vllm.options import VllmOptions
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, load_published
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import StopReason
from penstock.messages.task import Purpose, Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="no vLLM in this environment: `make vllm-env`, then `make test-engines`",
    ),
]
OPTIONS = VllmOptions(num_running_max=4, num_waiting_max=4, num_tokens_max=200)
# Widths that vLLM's kernels for the CPU take.
SHAPES = {
    "sparse": msgspec.structs.replace(CONFIG, hidden_size=64, head_dim=32),
    "dense": msgspec.structs.replace(DENSE, hidden_size=64, head_dim=32, intermediate_size=64),
}


@cache
def weights(version, name):
    return weights_of(version, SHAPES[name])


async def test_a_device_that_this_vllm_was_not_built_for_is_refused():
    options = msgspec.structs.replace(OPTIONS, device="cuda")
    engine = VllmEngine(SHAPES["dense"], options, tokenizer(), [STOP_ID])
    with pytest.raises(ConfigError, match=r"generator\.device: expected 'cpu'.*got 'cuda'"):
        await engine.start()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES)
async def started(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # For the sabotage.
        engine = VllmEngine(SHAPES[request.param], OPTIONS, tokenizer(), [STOP_ID])
        await engine.start()
        yield engine, request.param
        await engine.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_engine_conforms(check, started):
    engine, name = started
    try:
        await check(engine, partial(weights, name=name))
    finally:
        await engine.resume()
        await engine.abort()


async def test_a_replica_reports_what_vllms_process_uses(started):
    engine, name = started
    await load(engine, weights(0, name), 0)
    generator = Generator(engine, [Purpose.TRAIN], "west", "west.a")
    before_s = generator.processor_s()["engine"]
    await collect(engine, prompt(21), Sampling(seed=1, num_tokens_max=100))
    assert generator.processor_s()["engine"] > before_s > 0


async def test_logprobs_and_routes_are_the_trainers_after_every_update(started):
    engine, name = started
    for version in range(3):
        await load(engine, weights(version, name), version)
        policy = Policy(SHAPES[name])
        state = {n: torch.from_numpy(w) for n, w in weights(version, name).items()}
        load_published(policy, {n: w.view(PUBLISHED_DTYPE) for n, w in state.items()})
        reply = await collect(engine, prompt(21), Sampling(seed=1, num_tokens_max=100))
        ids = torch.tensor([*prompt(21).tolist(), *reply.token_ids])
        with torch.no_grad():
            output = policy(ids[:-1], [len(ids) - 1])
            logprobs = token_logprobs(policy.logits(output.hidden), ids[1:])
        np.testing.assert_allclose(reply.logprobs, logprobs[-100:], atol=1e-4)
        if SHAPES[name].num_experts:
            np.testing.assert_array_equal(reply.routes, output.routed_experts)
        np.testing.assert_allclose(
            engine.probe(), probe_of(weights(version, name), SHAPES[name]), atol=1e-4
        )


def turns_kept(worker):
    """Return the turns that the worker keeps anything of for a last record."""
    return [*worker._ended, *(turn.key for turn in worker._sampler.turns.values() if turn.key)]


async def test_worker_keeps_nothing_of_turns_that_are_over(started):
    engine, name = started
    await load(engine, weights(0, name), 0)
    await collect(engine, prompt(3), Sampling(num_tokens_max=5))
    await collect(engine, prompt(3), Sampling(num_tokens_max=5, top_k=3))
    chunks = engine.generate(prompt(3), Sampling(num_tokens_max=150), request_id="left")
    await anext(chunks)
    assert len(await worker_says(engine, turns_kept)) == 1
    await chunks.aclose()
    assert await worker_says(engine, turns_kept) == []
    chunks = engine.generate(prompt(3), Sampling(num_tokens_max=150), request_id="aborted")
    await anext(chunks)
    await engine.abort("aborted")
    assert [chunk async for chunk in chunks][-1].stop_reason is StopReason.ABORTED
    await collect(engine, prompt(3), Sampling(num_tokens_max=5))
    assert await worker_says(engine, turns_kept) == []


async def worker_says(engine, function):
    (answer,) = await engine._client._llm.collective_rpc(function)
    return answer


def keep_packed_experts(worker):
    """Have one reload keep the packed experts that the kernels hold, as vLLM does by itself."""
    runner = worker.model_runner
    methods = [getattr(m, "quant_method", None) for m in runner.get_model().modules()]
    kernels = [(m, m.moe_kernel) for m in methods if getattr(m, "moe_kernel", None) is not None]
    reload = runner.reload_weights

    def sabotaged(**arguments):
        for method, kernel in kernels:
            method.moe_kernel = kernel
        runner.reload_weights = reload
        reload(**arguments)

    runner.reload_weights = sabotaged
    return len(kernels)


async def test_no_token_of_a_sabotaged_reload_gets_out(started):
    engine, name = started
    if not SHAPES[name].num_experts:
        pytest.skip("a dense model has no packed experts")
    site = Site(engine, SHAPES[name])
    await site.relay.start(site.context)
    await site.publish(0, weights(0, name))
    assert await worker_says(engine, keep_packed_experts) == SHAPES[name].num_hidden_layers
    versions = []

    async def sample():
        sampling = Sampling(num_tokens_max=150, seed=3)
        async for chunk in engine.generate(prompt(3), sampling, request_id="r"):
            versions.extend([chunk.policy_version] * len(chunk.token_ids))

    await engine.pause()
    task = asyncio.create_task(sample())
    await asyncio.sleep(0.1)
    (applied,) = await site.publish(1, weights(1, name))
    assert site.context.gauges["digest_mismatches"] == 1
    assert applied.probe_matches and applied.policy_version == 1
    await engine.resume()
    with pytest.raises(EngineNotReadyError, match="failed their probe"):
        await task
    assert not versions
    await sample()
    assert set(versions) == {1}


def fail_after_half(worker):
    """Have one reload end in the middle of the tensors."""
    runner = worker.model_runner
    reload = runner.reload_weights

    def failing(weights_iterator):
        runner.reload_weights = reload
        tensors = list(weights_iterator)
        reload(weights_iterator=iter(tensors[: len(tensors) // 2]))
        raise RuntimeError("no room on the device")

    runner.reload_weights = failing


async def test_nothing_is_served_after_a_reload_that_failed_half_way(started):
    engine, name = started
    await load(engine, weights(0, name), 0)
    await worker_says(engine, fail_after_half)
    await engine.pause()
    task = asyncio.create_task(collect(engine, prompt(3), Sampling(num_tokens_max=50)))
    await asyncio.sleep(0.1)
    with pytest.raises(Exception, match="no room"):
        await load(engine, weights(1, name), 1)
    await engine.resume()
    with pytest.raises(EngineNotReadyError, match="failed their probe"):
        await task
    assert not engine.health().ready
    await load(engine, weights(1, name), 1)
    assert engine.health().ready
    await collect(engine, prompt(3), Sampling(num_tokens_max=5))
