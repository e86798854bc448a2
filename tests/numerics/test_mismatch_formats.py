"""Experts in MXFP8 and NVFP4: the frozen rounding on both sides, gradients straight through."""

import numpy as np
import pytest
import torch

from penstock.actors.generator.core import EngineCore
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.requests import GenerationRequest
from penstock.actors.policy.config import NumericsConfig, PolicyConfig
from penstock.actors.policy.experts import ExpertMlp, StraightThrough, round_to
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.kernels import native
from penstock.kernels.decode.kernel import round_mxfp8
from penstock.kernels.reference.quantize import mxfp8_dequantize, mxfp8_rows
from penstock.messages.task import Sampling


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def policy_in(expert_format, seed=0, scale=4.0):
    config = PolicyConfig(
        vocab_size=120,
        hidden_size=64,
        num_hidden_layers=2,
        head_dim=16,
        moe_intermediate_size=32,
        numerics=NumericsConfig(expert_format=expert_format),
    )
    policy = Policy(config, seed=seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1.0)
    return policy


@pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
def test_the_compiled_step_rounds_by_the_frozen_rule():
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, (2000, 32), dtype=np.uint64).astype(np.uint32)
    sizes = np.exp(rng.uniform(-40, 40, (2000, 1)))
    plain = (rng.standard_normal((2000, 32)) * sizes).astype(np.float32)
    odd = np.zeros((5, 32), np.float32)
    odd[1, 3], odd[2, 5:7], odd[3, 1], odd[4, 0] = np.inf, (-np.inf, 1), 1e-45, np.nan
    every_bf16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32).reshape(-1, 32)
    for values in (any_bits.view(np.float32), plain, odd, every_bf16):
        found = values.copy()
        round_mxfp8(found)
        expected = mxfp8_dequantize(*mxfp8_rows(values))
        is_nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), is_nan)
        np.testing.assert_array_equal(
            found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan]
        )


def test_without_a_compiler_rounding_is_the_same(monkeypatch):
    values = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    compiled = round_to(values, "mxfp8")
    monkeypatch.setattr("penstock.kernels.decode.kernel.decode_library", lambda: None)
    assert torch.equal(round_to(values, "mxfp8"), compiled)


@pytest.mark.parametrize("expert_format", ["mxfp8", "nvfp4"])
def test_sampler_and_trainer_round_alike(expert_format):
    policy = policy_in(expert_format).requires_grad_(False)
    core = EngineCore(policy.config, EngineOptions(num_tokens_max=128, num_running_max=4))
    assert core.decoder.name == "torch" or expert_format == "mxfp8"
    core.swap_model(core.decoder.prepare(policy), 0)
    prompt = np.random.default_rng(1).integers(0, 120, 30)
    core.add(GenerationRequest(prompt, Sampling(seed=1, num_tokens_max=40), "r", "", 0))
    chunks = []
    while core.waiting or core.num_running:
        chunks += [chunk for _, chunk in core.step()]
    token_ids = torch.from_numpy(np.concatenate([prompt, *(c.token_ids for c in chunks)])).long()
    recorded = torch.from_numpy(chunks[-1].routed_experts)
    found = np.concatenate([chunk.behavior_logprobs for chunk in chunks])

    def differences(expert_format):
        other = policy_in(expert_format).requires_grad_(False)
        output = other(token_ids[:-1], [len(token_ids) - 1], recorded)
        expected = token_logprobs(other.logits(output.hidden), token_ids[1:])[29:]
        return np.abs(expected.numpy() - found)

    assert np.median(differences(expert_format)) < 1e-4
    assert np.median(differences("bf16")) > 1e-3, "another format shows"


@pytest.mark.parametrize("expert_format", ["mxfp8", "nvfp4"])
def test_rows_are_rounded_apart(expert_format):
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    whole = round_to(values, expert_format)
    assert torch.equal(whole[3:4], round_to(values[3:4], expert_format))
    assert not torch.equal(whole, values)
    assert ((whole - values).abs().amax(1) <= 0.2 * values.abs().amax(1)).all()


def test_gradients_pass_straight_through():
    values = torch.randn(3, 32, requires_grad=True)
    StraightThrough.apply(values, "mxfp8").square().sum().backward()
    torch.testing.assert_close(values.grad, 2 * round_to(values.detach(), "mxfp8"))


def test_the_experts_gradient_is_that_of_the_rounded_operands():
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(*s, generator=generator) for s in ((7, 32), (7, 2)))
    gate_up = torch.randn(4, 64, 32, generator=generator)
    down = torch.randn(4, 32, 32, generator=generator).requires_grad_()
    ids = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2], [0, 1], [3, 0], [1, 3]])
    out = ExpertMlp.apply(x, ids, weights, gate_up, down, "mxfp8")
    out.sum().backward()
    hidden = torch.einsum("td,tkfd->tkf", x, gate_up[ids])
    gate, up = hidden.chunk(2, -1)
    activation = round_to(torch.nn.functional.silu(gate) * up, "mxfp8")
    expected = torch.zeros_like(down)
    for t, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            expected[expert] += weights[t, k] * activation[t, k].expand(32, 32)
    torch.testing.assert_close(down.grad, expected, rtol=1e-4, atol=1e-4)


def test_a_policy_with_mxfp8_experts_learns():
    policy = policy_in("mxfp8", scale=1.0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    ids = torch.arange(96) * 7 % 120
    losses = []
    for _ in range(30):
        hidden = policy(ids[:-1], [95]).hidden
        loss = -token_logprobs(policy.logits(hidden), ids[1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
