"""Exact mode: the trainer's logprobs are the sampler's, bit for bit; without it they are not."""

import numpy as np
import pytest
import torch

from penstock.actors.generator.core import EngineCore, EngineOptions
from penstock.actors.generator.request import Request
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.exact import ExactForward
from penstock.actors.policy.model import Policy
from penstock.actors.policy.numerics import ExactModeError, NumericsConfig
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.sequences import TrainingSequence
from penstock.kernels import native
from penstock.messages.task import Sampling

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
TEMPERATURE = 0.9
NUM_TOKENS = 64
NUM_REQUESTS = 160


def config_of(mode):
    return PolicyConfig(
        vocab_size=230,
        hidden_size=48,
        num_hidden_layers=3,
        head_dim=16,
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=3,
        max_position_embeddings=256,
        numerics=NumericsConfig(mode=mode),
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lively(mode="exact", seed=0):
    """A policy far from uniform; the same weights in any mode."""
    policy = Policy(config_of(mode), seed=seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.1)
    return policy


def prompts(count, shared=40):
    """Groups of four that share a beginning."""
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 230, shared) for _ in range(-(-count // 4))]
    return [np.concatenate([groups[i // 4], rng.integers(0, 230, 3 + i % 29)]) for i in range(count)]


def sample(policy, requests, **options):
    """Run requests together: the sequences that a trainer gets."""
    core = EngineCore(policy.config, EngineOptions(num_tokens_max=256, **options))
    core.swap_model(core.decoder.prepare(policy), 0)
    for request in requests:
        core.add(request)
    chunks = {request.request_id: [] for request in requests}
    while core.waiting or core.num_running:
        for request, chunk in core.step():
            chunks[request.request_id].append(chunk)
    return [sequence(request, chunks[request.request_id]) for request in requests], core


def sequence(request, chunks):
    sampled = np.concatenate([chunk.token_ids for chunk in chunks])
    token_ids = np.concatenate([request.prompt[: request.num_prompt_tokens], sampled])
    return TrainingSequence(
        rollout_id=request.request_id,
        token_ids=token_ids.astype(np.int64),
        sampled_at=np.arange(len(token_ids) - len(sampled), len(token_ids)),
        behavior_logprobs=np.concatenate([chunk.behavior_logprobs for chunk in chunks]),
        routed_experts=chunks[-1].routed_experts,
        advantage=1.0,
    )


def requests_for(ids):
    sampling = {"temperature": TEMPERATURE, "num_tokens_max": NUM_TOKENS}
    return [
        Request(token_ids, Sampling(seed=i, **sampling), f"r{i}", "", 0)
        for i, token_ids in enumerate(ids)
    ]


def differences(policy, sequences, pack=8):
    """|trainer - sampler| of every sampled token, trained `pack` sequences at a time."""
    forward = SequenceForward(policy, TEMPERATURE)
    found = []
    for start in range(0, len(sequences), pack):
        batch = sequences[start : start + pack]
        current, _ = forward.logprobs(batch)
        behavior = np.concatenate([each.behavior_logprobs for each in batch])
        found.append(np.abs(current.detach().numpy() - behavior))
    return np.concatenate(found)


@pytest.fixture(scope="module")
def sampled():
    """10k tokens from many prompts, in one crowded engine with small prefill chunks."""
    sequences, core = sample(
        lively(), requests_for(prompts(NUM_REQUESTS)), num_running_max=24, prefill_tokens_max=37
    )
    assert core.metrics.num_cached_tokens > 1000, "prefixes are reused"
    return sequences


def test_exact_mode_has_no_mismatch_over_ten_thousand_tokens(sampled):
    found = differences(lively("exact"), sampled)
    assert found.size >= 10_000
    assert found.max() == 0.0


@pytest.mark.parametrize("mode", ["fast", "off"])
def test_other_modes_have_some(sampled, mode):
    assert differences(lively(mode), sampled[:16]).max() > 0.0


@pytest.mark.parametrize("pack", [1, 3, 16])
def test_what_a_pass_holds_changes_no_bit(sampled, pack):
    assert differences(lively(), sampled[:16], pack=pack).max() == 0.0


def test_one_request_alone_has_the_bits_of_a_crowd(sampled):
    alone, _ = sample(lively(), requests_for(prompts(NUM_REQUESTS))[5:6])
    assert alone[0].behavior_logprobs.tobytes() == sampled[5].behavior_logprobs.tobytes()
