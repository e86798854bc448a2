"""Exact mode: the trainer's logprobs are the sampler's, bit for bit; without it they are not."""

import numpy as np
import pytest
import torch
from msgspec import structs

from penstock.actors.generator.actor import seal_chunk
from penstock.actors.generator.core import EngineCore
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.requests import GenerationRequest
from penstock.actors.policy.checkpoint import state_digest
from penstock.actors.policy.config import ExactModeError, NumericsConfig, PolicyConfig
from penstock.actors.policy.exact import ExactForward, LogprobRequest
from penstock.actors.policy.model import Policy
from penstock.actors.policy.packing import pack_tree
from penstock.actors.trainer.distribution import TurnDraw
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.sequences import TrainingSequence, training_sequence
from penstock.kernels import native
from penstock.kernels.arrays import to_array
from penstock.kernels.route_segments import open_routes
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.task import Sampling

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
TEMPERATURE = 0.9
NUM_TOKENS = 64
NUM_REQUESTS = 160


def config_of(mode, expert_format="bf16", **changes):
    config = PolicyConfig(
        vocab_size=230,
        hidden_size=48,
        num_hidden_layers=3,
        head_dim=16,
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=3,
        max_position_embeddings=256,
    )
    numerics = NumericsConfig(mode=mode, expert_format=expert_format)
    return structs.replace(config, numerics=numerics, **changes)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lively(mode="exact", seed=0, **changes):
    """A policy far from uniform; the same weights in any mode."""
    policy = Policy(config_of(mode, **changes), seed=seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.1)
    return policy


def prompts(count, shared=40):
    """Groups of four that share a beginning."""
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 230, shared) for _ in range(-(-count // 4))]
    return [
        np.concatenate([groups[i // 4], rng.integers(0, 230, 3 + i % 29)]) for i in range(count)
    ]


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
    start = len(token_ids) - len(sampled)
    return TrainingSequence(
        rollout_id=request.request_id,
        num_inputs=len(token_ids) - 1,
        token_ids=token_ids.astype(np.int64),
        sampled_at=np.arange(start, len(token_ids)),
        draws=(TurnDraw(sampling=request.sampling, start=start, at=np.arange(len(sampled))),),
        is_trained=np.ones(len(sampled), bool),
        versions=np.zeros(len(sampled), np.int64),
        behavior_logprobs=np.concatenate([chunk.behavior_logprobs for chunk in chunks]),
        routed_experts=chunks[-1].routed_experts,
        advantages=np.ones(len(sampled), np.float32),
    )


def requests_for(ids):
    sampling = {"temperature": TEMPERATURE, "num_tokens_max": NUM_TOKENS}
    return [
        GenerationRequest(token_ids, Sampling(seed=i, **sampling), f"r{i}", "", 0)
        for i, token_ids in enumerate(ids)
    ]


def differences(policy, sequences, pack=8):
    """|trainer - sampler| of every sampled token, trained `pack` sequences at a time."""
    forward = SequenceForward(policy)
    found = []
    for start in range(0, len(sequences), pack):
        batch = sequences[start : start + pack]
        current = forward.run(batch).logprobs
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


@pytest.mark.parametrize(
    ("expert_format", "width"), [("bf16", 80), ("mxfp8", 96)], ids=["bf16", "mxfp8"]
)
def test_a_dense_model_has_no_mismatch_in_exact_mode(expert_format, width):
    dense = {
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": width,
        "hidden_size": 64,
        "expert_format": expert_format,
    }
    sequences, _ = sample(lively(**dense), requests_for(prompts(24)), prefill_tokens_max=37)
    assert {each.routed_experts.shape[1:] for each in sequences} == {(3, 0)}
    assert differences(lively("exact", **dense), sequences).max() == 0.0
    assert differences(lively("fast", **dense), sequences).max() > 0.0


@pytest.mark.parametrize("mode", ["fast", "off"])
def test_other_modes_have_some(sampled, mode):
    assert differences(lively(mode), sampled[:16]).max() > 0.0


@pytest.mark.parametrize("pack", [1, 3, 16])
def test_what_a_pass_holds_changes_no_bit(sampled, pack):
    assert differences(lively(), sampled[:16], pack=pack).max() == 0.0


def test_one_request_alone_has_the_bits_of_a_crowd(sampled):
    alone, _ = sample(lively(), requests_for(prompts(NUM_REQUESTS))[5:6])
    assert alone[0].behavior_logprobs.tobytes() == sampled[5].behavior_logprobs.tobytes()


def test_a_change_of_version_in_mid_run_leaves_none_either():
    """What is in flight is computed again: each version's trainer agrees with what it sampled."""
    old, new = lively(seed=0), lively(seed=1)
    core = EngineCore(old.config, EngineOptions(num_tokens_max=256, num_running_max=12))
    core.swap_model(core.decoder.prepare(old), 0)
    requests = requests_for(prompts(24))
    for request in requests:
        core.add(request)
    chunks = {request.request_id: [] for request in requests}

    def take(outputs):
        for request, chunk in outputs:
            chunks[request.request_id].append(chunk)

    for _ in range(90):
        take(core.step())
    take(core.swap_model(core.decoder.prepare(new), 1))
    while core.waiting or core.num_running:
        take(core.step())
    sequences = [sequence(request, chunks[request.request_id]) for request in requests]
    versions = [
        np.concatenate([np.full(len(c.token_ids), c.policy_version) for c in chunks[r.request_id]])
        for r in requests
    ]
    assert any(len(set(v)) == 2 for v in versions), "some were in flight"
    drawn = np.concatenate(versions)
    found = differences(new, sequences)
    assert (drawn == 1).sum() > 300
    assert found[drawn == 1].max() == 0.0
    assert found[drawn == 0].max() > 0.0
    before = [s for s, v in zip(sequences, versions, strict=True) if set(v) == {0}]
    assert differences(old, before).max() == 0.0


def test_turns_of_a_session_agree_over_a_change_of_version():
    old, new = lively(seed=0), lively(seed=1)
    core = EngineCore(old.config, EngineOptions(num_tokens_max=256))
    context, turns = np.zeros(0, np.int32), []
    rng = np.random.default_rng(5)
    for index, policy in enumerate((old, old, new, new)):
        if index in (0, 2):
            core.swap_model(core.decoder.prepare(policy), int(policy is new))
        ids = rng.integers(0, 230, 9).astype(np.int32)
        sampling = Sampling(seed=index, temperature=TEMPERATURE, num_tokens_max=12)
        routes_from = max(len(context) - 1, 0)
        context = np.concatenate([context, ids])
        request = GenerationRequest(context, sampling, f"t{index}", "session", routes_from)
        core.add(request)
        chunks = []
        while core.waiting or core.num_running:
            chunks += [chunk for _, chunk in core.step()]
        turns.append(turn_of(ids, chunks, sampling))
        context = np.concatenate([context, *(chunk.token_ids for chunk in chunks)])
    segments = [[open_routes(s) for s in turn.route_segments] for turn in turns]
    assert segments[1][0].first_position > 0, "only what is new is sent"
    assert segments[2][0].first_position == 0, "computed again, sent again"
    assert segments[3][0].first_position > 0
    last = training_sequence("r", turns, config_of("exact"), 1.0)
    found = differences(new, [last])
    assert found[24:].max() == 0.0
    assert found[:24].max() > 0.0


def turn_of(context_ids, chunks, sampling):
    token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
    return Turn(
        context_ids=to_array(context_ids),
        token_ids=to_array(token_ids),
        behavior_logprobs=to_array(np.concatenate([c.behavior_logprobs for c in chunks])),
        version_spans=[
            VersionSpan(policy_version=chunks[-1].policy_version, num_tokens=len(token_ids))
        ],
        stop_reason=StopReason.LENGTH,
        route_segments=seal_chunk(chunks[-1], 6),
        sampling=sampling,
    )


def test_the_backward_pass_gives_the_same_bits_every_time(sampled):
    def gradients():
        policy = lively()
        current = SequenceForward(policy).run(sampled[:12]).logprobs
        current.sum().backward()
        return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}

    first = gradients()
    assert len(first) > 20
    assert state_digest(gradients()) == state_digest(first)


def test_gradients_are_those_of_fast_mode(sampled):
    found = []
    for mode in ("exact", "fast"):
        policy = lively(mode)
        current = SequenceForward(policy).run(sampled[:12]).logprobs
        current.sum().backward()
        found.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        assert (gradient - found[1][name]).norm() <= 1e-4 * found[1][name].norm(), name


def test_mxfp8_experts_are_exact_too():
    policy = mxfp8_policy()
    sequences, _ = sample(policy, requests_for(prompts(12)), prefill_tokens_max=37)
    assert differences(policy, sequences).max() == 0.0


def mxfp8_policy():
    config = structs.replace(
        config_of("exact"),
        hidden_size=64,
        moe_intermediate_size=32,
        numerics=NumericsConfig(mode="exact", expert_format="mxfp8"),
    )
    policy = Policy(config, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.1)
    return policy


def test_without_a_compiler_exact_mode_is_refused(monkeypatch):
    monkeypatch.setattr("penstock.kernels.decode.kernel.decode_library", lambda: None)
    with pytest.raises(ExactModeError, match="compiled step"):
        EngineCore(config_of("exact"), EngineOptions(num_tokens_max=64, num_running_max=2))
    with pytest.raises(ExactModeError, match="C compiler"):
        forward = ExactForward(lively())
        tree = pack_tree([np.arange(4)], [np.full((4, 3, 3), -1)])
        forward.run(tree, LogprobRequest.plain(np.arange(3), np.arange(3)))
