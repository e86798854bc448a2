"""LoRA of the built-in policy against full training, and against itself in float64."""

import msgspec
import pytest
import torch
from tests.numerics.adapter_steps import (
    ADAPTED,
    ADAPTER,
    IDS,
    NUM_STEPS,
    OPTIMIZER,
    SHAPE,
    freeze_identity,
    take_steps,
)
from torch.func import functional_call
from torch.nn import functional as F

from penstock.actors.policy.adapter import LowRank
from penstock.actors.policy.checkpoint import (
    hf_views,
    load_published,
    merged_policy,
    publishable_state,
)
from penstock.actors.policy.config import ADAPTER_TARGETS, AdapterConfig, PolicyConfig
from penstock.actors.policy.exact import ExactForward, LogprobRequest
from penstock.actors.policy.model import Policy
from penstock.actors.policy.packing import pack_tree
from penstock.actors.trainer.learner import Learner

MATRICES = ("attention.qkv", "attention.output", "experts.gate_up", "experts.down")
SPARSE = PolicyConfig(adapter=AdapterConfig(rank=3, targets=ADAPTER_TARGETS[:4]), mtp_num_heads=0)


def test_full_rank_is_full_training_of_the_same_matrices():
    """With A the identity and scale 1, AdamW moves B as it moves the matrix itself."""
    full, adapted = Policy(SHAPE, seed=1), Policy(ADAPTED, seed=1)
    for name, parameter in full.named_parameters():
        parameter.requires_grad_(name.endswith(MATRICES))
    freeze_identity(adapted.named_parameters())
    start = {name: view.clone() for name, view in hf_views(full).items()}
    for policy in (full, adapted):
        take_steps(Learner(policy, OPTIMIZER))
    found, merged = hf_views(full), hf_views(merged_policy(adapted))
    moved = max(float((found[name] - start[name]).abs().max()) for name in found)
    assert moved > NUM_STEPS * OPTIMIZER.learning_rate / 10
    for name, view in found.items():
        torch.testing.assert_close(merged[name], view, atol=1e-5, rtol=0, msg=name)


def test_both_factors_train_as_in_float64():
    """The same policy with W + s B A in the place of each W, in float64 by autograd alone."""
    config = msgspec.structs.replace(ADAPTED, adapter=AdapterConfig(rank=3, alpha=12.0))
    learner = Learner(Policy(config, seed=1), OPTIMIZER)
    expected = float64_factors(learner.policy)
    take_steps(learner)
    for name, value in learner.parameters.items():
        torch.testing.assert_close(value.detach().double(), expected[name], atol=1e-5, rtol=0)
        assert not torch.equal(value, Policy(config, seed=1).get_parameter(name)), name


def float64_factors(policy):
    """Every factor after the steps, by name."""
    plain = Policy(SHAPE).double()
    base = {
        name: policy.get_parameter(name).detach().double() for name, _ in plain.named_parameters()
    }
    factors = {
        name: parameter.detach().double().clone().requires_grad_()
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(
        factors.values(), lr=OPTIMIZER.learning_rate, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps, weight_decay=0.0,
    )  # fmt: skip
    scale = policy.config.adapter.scale

    def product(path):
        return scale * factors[f"{path}.b"] @ factors[f"{path}.a"]

    for _ in range(NUM_STEPS):
        weights = dict(base)
        for index in range(SHAPE.num_hidden_layers):
            at, mlp = f"layers.{index}.attention", f"layers.{index}.experts"
            qkv = [product(f"{at}.adapters.{name}_proj") for name in "qkv"]
            weights[f"{at}.qkv"] = base[f"{at}.qkv"] + torch.cat(qkv)
            weights[f"{at}.output"] = base[f"{at}.output"] + product(f"{at}.adapters.o_proj")
            halves = [product(f"{mlp}.adapters.{name}_proj") for name in ("gate", "up")]
            weights[f"{mlp}.gate_up"] = base[f"{mlp}.gate_up"] + torch.cat(halves)
            weights[f"{mlp}.down"] = base[f"{mlp}.down"] + product(f"{mlp}.adapters.down_proj")
        optimizer.zero_grad()
        losses = []
        for ids in IDS.split([20, 28]):
            hidden = functional_call(plain, weights, (ids, [len(ids)])).hidden
            losses.append(F.cross_entropy((hidden @ weights["embedding"].T)[:-1], ids[1:]))
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(factors.values(), OPTIMIZER.grad_clip)
        optimizer.step()
    return {name: factor.detach() for name, factor in factors.items()}


@pytest.mark.parametrize("config", [ADAPTED, SPARSE], ids=["dense", "sparse"])
def test_merged_weights_compute_what_adapters_do(config):
    policy = Policy(config, seed=1)
    with torch.no_grad():
        for module in policy.modules():
            if isinstance(module, LowRank):
                module.b.normal_(std=0.05)
    load_published(policy, publishable_state(policy))
    ids = IDS[:30]
    own = policy.logits(policy(ids, [len(ids)]).hidden).log_softmax(-1)
    base = Policy(config, seed=1)
    without = base.logits(base(ids, [len(ids)]).hidden).log_softmax(-1)
    assert (own - without).abs().max() > 0.01
    merged = merged_policy(policy)
    again = merged.logits(merged(ids, [len(ids)]).hidden).log_softmax(-1)
    torch.testing.assert_close(again, own, atol=1e-5, rtol=0)
    if config.is_dense:
        routes = [torch.zeros(30, 2, 0, dtype=torch.int64).numpy()]
        tree = pack_tree([ids.numpy()], routes)
        wanted = LogprobRequest.plain(torch.arange(29).numpy(), ids[1:].numpy())
        exact = ExactForward(policy).run(tree, wanted).logprobs
        torch.testing.assert_close(
            exact, own[:-1].gather(1, ids[1:, None])[:, 0], atol=1e-4, rtol=0
        )


def test_the_base_has_no_gradient_moment_or_place_in_a_state():
    learner = Learner(Policy(ADAPTED, seed=1), OPTIMIZER)
    take_steps(learner)
    num_factors = 2 * len(ADAPTER.targets) * SHAPE.num_hidden_layers
    assert len(learner.state()) == num_factors * 4, "weights, two moments and a step count"
    assert all(".adapters." in name for name in learner.state())
    assert sum(p.grad is not None for p in learner.policy.parameters()) == 0
