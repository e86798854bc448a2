"""What the engine says it sampled is what the trainer computes; and the compiled step is exact."""

import math

import numpy as np
import pytest
import torch

from penstock.actors.generator.core import EngineCore
from penstock.actors.generator.decoders.packed import Decoder
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.requests import GenerationRequest
from penstock.actors.generator.sampler import SamplingBatch, sample
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.native import decode_shape
from penstock.actors.policy.operations import token_logprobs
from penstock.actors.policy.shaping import cut_support
from penstock.kernels.decode.kernel import DecodeKernel
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


SHARP = np.array([-120.0, -200.0, 3.0, 3.0, -150.0, *[-300.0] * 30, 2.9, -110.0], np.float32)


@pytest.mark.parametrize("step", ["native", "torch"])
@pytest.mark.parametrize("temperature", [1e-3, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 1e-6])
def test_no_token_without_probability_is_drawn(step, temperature, top_p):
    """Not even by the smallest number, at which the first of the vocabulary has its turn."""
    uniforms = [0.0, 2**-149, 2**-60, 0.5, 1.0 - 2**-24, 1.0 - 2**-53]
    logits = torch.from_numpy(np.tile(SHARP, (len(uniforms), 1)))
    settings = Sampling(temperature=temperature, top_p=top_p)
    logits.masked_fill_(~cut_support(logits[0], settings), -torch.inf)
    batch = SamplingBatch([temperature] * len(uniforms), uniforms)
    if step == "torch":
        tokens, logprobs = sample(logits.clone(), batch)
    else:
        shape = decode_shape(PolicyConfig(vocab_size=len(SHARP)), 1, 16)
        kernel = DecodeKernel.load(shape)
        if kernel is None:
            pytest.skip("no C compiler")
        tokens, logprobs = kernel.sample(logits.numpy(), batch.temperatures, batch.uniforms)
    assert set(tokens) <= {2, 3, len(SHARP) - 2}
    assert -12.0 < min(logprobs) <= max(logprobs) <= 0.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"top_p": 0.4}, [0]), ({"top_p": 0.5}, [0]), ({"top_p": 0.6}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2]), ({"top_k": 3, "top_p": 0.6}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3]), ({"min_p": 0.25}, [0, 1, 2]), ({"min_p": 1.0}, [0]),
        ({"min_p": 0.25, "temperature": 0.5}, [0, 1]),
        ({"top_k": 1, "temperature": 0.0}, [0, 1, 2, 3]), ({"top_p": 1e-6}, [0]),
    ],
)  # fmt: skip
def test_each_cut_leaves_the_smallest_set_that_it_names(values, expected):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log()
    is_left = cut_support(logits, Sampling(**values))
    assert torch.nonzero(is_left).flatten().tolist() == expected
