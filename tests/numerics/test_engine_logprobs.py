"""What the engine says it sampled is what the trainer computes; and the compiled step is exact."""

import math

import numpy as np
import pytest
import torch
from tests.simt.shim import SIMT

from penstock.actors.generator.core import EngineCore, EngineOptions
from penstock.actors.generator.decoder import Decoder
from penstock.actors.generator.request import GenerationRequest
from penstock.actors.generator.sampler import SamplingBatch, sample
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy, token_logprobs
from penstock.kernels.backend import KernelArgumentError
from penstock.kernels.ops.checks import check_values
from penstock.messages.task import Sampling

CONFIG = PolicyConfig(
    vocab_size=230,
    hidden_size=48,
    num_hidden_layers=3,
    head_dim=16,
    moe_intermediate_size=48,
    num_experts=6,
    num_experts_per_tok=3,
    max_position_embeddings=256,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lively():
    policy = Policy(CONFIG, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.1)
    return policy.requires_grad_(False)


def run(policy, requests, *, step="native", num_threads=1, prefill_tokens_max=512):
    """Run requests to their end: request_id -> (token ids, logprobs, routes)."""
    options = EngineOptions(
        num_tokens_max=256, num_threads=num_threads, prefill_tokens_max=prefill_tokens_max
    )
    core = EngineCore(CONFIG, options)
    if step == "torch":
        core.decoder = Decoder(CONFIG, core.cache)
    elif core.decoder.name != "native":
        pytest.skip("no C compiler")
    core.swap_model(core.decoder.prepare(policy), 0)
    for request in requests:
        core.add(request)
    chunks = {request.request_id: [] for request in requests}
    while core.waiting or core.num_running:
        for request, chunk in core.step():
            chunks[request.request_id].append(chunk)
    return {
        name: (
            np.concatenate([chunk.token_ids for chunk in parts]),
            np.concatenate([chunk.behavior_logprobs for chunk in parts]),
            parts[-1].routed_experts,
        )
        for name, parts in chunks.items()
    }


def request(index, session="", **sampling):
    token_ids = np.random.default_rng(index).integers(0, CONFIG.vocab_size, 10 + 5 * index)
    values = {"seed": index, "num_tokens_max": 40} | sampling
    return GenerationRequest(token_ids, Sampling(**values), f"r{index}", session, 0)


def test_a_value_that_a_gpu_found_wrong_late_is_raised_by_the_step():
    core = EngineCore(CONFIG, EngineOptions(num_tokens_max=256))
    core.swap_model(core.decoder.prepare(lively()), 0)
    core.add(request(0))
    check_values("experts", torch.tensor([9]), 0, 7, backend=SIMT)  # deferred as a GPU's are
    with pytest.raises(KernelArgumentError, match=r"experts: expected 0\.\.7, got 9"):
        core.step()


@pytest.mark.parametrize("step", ["native", "torch"])
def test_engine_logprobs_and_routes_equal_the_trainers(step):
    policy = lively()
    requests = [request(index) for index in range(8)]
    results = run(policy, requests, step=step)
    for each in requests:
        token_ids, logprobs, routes = results[each.request_id]
        full = torch.from_numpy(np.concatenate([each.prompt, token_ids])).long()
        recorded = torch.from_numpy(routes).to(torch.int16)
        output = policy(full[:-1], [len(full) - 1], recorded)
        expected = token_logprobs(policy.logits(output.hidden), full[1:])[len(each.prompt) - 1 :]
        assert output.router_mismatch == 0.0
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)


def test_both_steps_sample_the_same_tokens():
    policy = lively()
    native = run(policy, [request(i) for i in range(6)])
    portable = run(policy, [request(i) for i in range(6)], step="torch")
    for name, (token_ids, _, _) in native.items():
        np.testing.assert_array_equal(token_ids, portable[name][0])


@pytest.mark.parametrize(("num_threads", "prefill_tokens_max"), [(1, 512), (2, 512), (1, 7)])
def test_compiled_step_is_batch_invariant_to_the_bit(num_threads, prefill_tokens_max):
    policy = lively()
    together = run(
        policy,
        [request(i) for i in range(9)],
        num_threads=num_threads,
        prefill_tokens_max=prefill_tokens_max,
    )
    for index in range(9):
        alone = run(policy, [request(index)])[f"r{index}"]
        for ours, theirs in zip(together[f"r{index}"], alone, strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 0.5])
    count = 20_000
    uniforms = np.random.default_rng(0).random(count).tolist()
    batch = SamplingBatch([0.5] * count, uniforms)
    token_ids, logprobs = sample(logits.repeat(count, 1), batch)
    expected = (logits / 0.5).softmax(0).numpy()
    shares = np.bincount(token_ids, minlength=5) / count
    assert np.abs(shares - expected).max() < 4 * math.sqrt(0.25 / count)
    assert shares[3] == 0.0
    np.testing.assert_allclose(np.exp(logprobs), expected[token_ids], rtol=1e-5)


def test_extreme_uniforms_stay_inside_the_support():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]] * 2)
    token_ids, _ = sample(logits, SamplingBatch([1.0] * 2, [0.0, 1.0 - 2**-53]))
    assert token_ids == [1, 2]
