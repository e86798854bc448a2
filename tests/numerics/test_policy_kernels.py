"""The policy as it computes on a GPU: through `kernels.ops`, here on their reference and sources.

Which tensors have kernels is decided in one place; here CPU tensors have them. `tests/gpu` runs the
same policy on a device.
"""

import msgspec
import numpy as np
import pytest
import torch
from tests.numerics.engine_rollouts import SPARSE, manifest_of, rollouts
from tests.simt.shim import COMPILER, SIMT

from penstock.actors.generator.decoders.graph import GraphDecoder
from penstock.actors.generator.decoders.native import NativeDecoder
from penstock.actors.generator.decoders.packed import Decoder, PrefillChunk, StepBatch
from penstock.actors.generator.kv_cache import SlotCache
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy import model, operations
from penstock.actors.policy.checkpoint import (
    as_numpy,
    hf_views,
    publishable_state,
    state_digest,
)
from penstock.actors.policy.config import KERNEL_BOUNDS, NumericsConfig
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.config import LossConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.step import train_step
from penstock.kernels.delta import Patch
from penstock.kernels.ops import backends, routing, rows
from penstock.kernels.reference.routing import ROUTE_FREE

DENSE = msgspec.structs.replace(
    SPARSE, num_experts=0, num_experts_per_tok=0, intermediate_size=64, moe_intermediate_size=64
)
MXFP8 = msgspec.structs.replace(SPARSE, numerics=NumericsConfig(expert_format="mxfp8"))
PLAUSIBLE = msgspec.structs.replace(SPARSE, numerics=NumericsConfig(plausible=0.9))
LENGTHS = [5, 20, 11]
NUM_TOKENS = sum(LENGTHS)


@pytest.fixture
def kernels(monkeypatch):
    """Give CPU tensors kernels: those of a backend, the reference by default."""

    def use(backend=None):
        monkeypatch.setattr(operations, "has_kernels", lambda tensor: True)
        if backend is not None:
            monkeypatch.setitem(backends._BACKENDS, "cpu", backend)

    yield use
    monkeypatch.undo()


def sharp_policy(config):
    policy = Policy(config, seed=3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3.0)  # Far from uniform, so that an error would show.
    return policy


def passed(policy):
    """Return logprobs, routes, flips, and all gradients, of one pass over recorded routes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, policy.config.vocab_size, (NUM_TOKENS,), generator=generator)
    recorded = None
    if not policy.config.is_dense:
        order = torch.rand(NUM_TOKENS, 2, policy.config.num_experts, generator=generator)
        recorded = order.argsort(-1)[..., : policy.config.num_experts_per_tok]
        recorded[7:9] = ROUTE_FREE
    policy.zero_grad()
    output = policy(ids, LENGTHS, recorded)
    logprobs = operations.token_logprobs(policy.logits(output.hidden), ids.roll(-1))
    later = policy.logits(policy.mtp_hidden(output.hidden[:-1], ids[1:]))
    later = operations.token_logprobs(later, ids.roll(-2)[:-1])
    (output.balance_loss - logprobs.mean() - later.mean()).backward()
    gradients = {name: each.grad for name, each in policy.named_parameters()}
    return logprobs.detach(), output.routed_experts, output.flips, gradients


@pytest.mark.parametrize("config", [SPARSE, DENSE, MXFP8, PLAUSIBLE], ids="sdmp")
def test_kernels_give_the_policy_that_torch_gives_and_its_gradient(config, kernels):
    policy = sharp_policy(config)
    expected = passed(policy)
    kernels()
    found = passed(policy)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-5)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    assert found[0].unique().numel() > NUM_TOKENS / 2, "logprobs must differ for this to mean much"
    for name, gradient in expected[3].items():
        assert gradient.abs().max() > 0, name
        assert (found[3][name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_a_tree_of_pieces_is_attended_at_once_as_piece_by_piece(kernels, monkeypatch):
    policy, ids = sharp_policy(SPARSE), torch.arange(NUM_TOKENS + 6)
    tree = ([*LENGTHS, 6], None, [-1, 0, 0, 1])
    kernels()
    at_once = policy(ids, *tree)
    monkeypatch.setattr(model, "WHOLE_SCORES_MAX", 0)
    by_piece = policy(ids, *tree)
    torch.testing.assert_close(at_once.hidden, by_piece.hidden, rtol=0, atol=1e-4)
    assert torch.equal(at_once.routed_experts, by_piece.routed_experts)


@pytest.mark.parametrize("config", [SPARSE, DENSE, MXFP8], ids="sdm")
def test_the_step_that_a_gpu_records_computes_what_the_cpus_does(config):
    policy = sharp_policy(config).requires_grad_(False)
    caches = [SlotCache(config, 4, 256, torch.device("cpu")) for _ in range(2)]
    plain = Decoder(config, caches[0])
    recorded = object.__new__(GraphDecoder)  # Without its stream and its graphs.
    recorded._config, recorded._cache = config, caches[1]
    recorded._columns = torch.arange(256)
    batches = [
        StepBatch(list(range(20)), [], [PrefillChunk(0, 0, 20)], [19]),
        StepBatch(
            [7, *range(50, 62)], [20], [PrefillChunk(1, 0, 5), PrefillChunk(2, 0, 7)], [0, 5]
        ),
        StepBatch([3, 4, 5], [21, 5], [PrefillChunk(2, 7, 1)], [0, 1, 2]),
    ]
    for batch in batches:
        rows, positions = batch.places()
        expected = plain.step(plain.prepare(policy), batch)
        wanted = batch.output_rows + [0] * (len(rows) - len(batch.output_rows))
        inputs = torch.tensor([batch.token_ids, rows, positions, wanted])
        logits, routes = recorded._compute(plain.prepare(policy), inputs, 128)
        torch.testing.assert_close(logits[: len(expected)], expected, rtol=0, atol=2e-5)
        assert torch.equal(routes, caches[0].routes[rows, positions])
        torch.testing.assert_close(caches[1].kv, caches[0].kv, rtol=0, atol=2e-5)


@pytest.mark.skipif(COMPILER is None, reason="no g++ or clang++")
def test_the_cuda_sources_give_the_bits_of_their_reference(kernels):
    policy = sharp_policy(MXFP8)
    kernels()
    expected = passed(policy)
    kernels(SIMT)
    found = passed(policy)
    for index in range(3):
        assert torch.equal(found[index], expected[index])
    for name, gradient in expected[3].items():
        assert torch.equal(found[3][name], gradient), name


async def test_what_kernels_sampled_torch_trains_without_mismatch(kernels, monkeypatch):
    learner = Learner(sharp_policy(SPARSE), OptimizerConfig())
    monkeypatch.setattr(NativeDecoder, "load", lambda *_: None)
    with monkeypatch.context() as sampling:
        sampling.setattr(operations, "has_kernels", lambda tensor: True)
        turns = await rollouts(learner, 2)
    config = TrainerConfig(loss=LossConfig(token_denominator=8.0))
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    plain = train_step(learner, manifest_of(turns), turns, config)
    assert plain.metrics["router_mismatch"] == 0.0
    assert plain.metrics["mismatch_k3"] < 1e-9
    learner.load_state(before)
    kernels()
    through = train_step(learner, manifest_of(turns), turns, config)
    for name in ("loss", "grad_norm", "entropy", "logprob_mean"):
        assert through.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-4, abs=1e-6)
    assert through.weights_digest == learner.weights_digest()


async def test_a_patch_of_staged_weights_is_applied_by_the_kernel(kernels, monkeypatch):
    monkeypatch.setattr(NativeDecoder, "load", lambda *_: None)
    old, new = Policy(SPARSE, seed=1), Policy(SPARSE, seed=1)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    view = hf_views(new)[name].view(-1)
    at = np.array([0, 5, view.numel() - 1])
    view[torch.from_numpy(at)] += 0.5
    bits = as_numpy(publishable_state(new)[name]).reshape(-1)[at]
    kernels()
    engine = TorchEngine(SPARSE)
    engine.start()
    try:
        await engine.begin_update()
        await engine.apply({key: as_numpy(t) for key, t in publishable_state(old).items()})
        await engine.apply({name: Patch(flat_indices=at, values=bits)})
        await engine.commit(0, state_digest(publishable_state(new)))
    finally:
        await engine.stop()


def test_bounds_of_a_policy_are_those_of_the_kernels():
    assert KERNEL_BOUNDS == {
        "num_experts": routing.NUM_EXPERTS_MAX,
        "num_experts_per_tok": routing.NUM_CHOSEN_MAX,
        "vocab_size": rows.NUM_LOGITS_MAX,
    }
