"""Drafts change no token, no logprob and no route, whatever is drafted; and they are bounded."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.generator import drafts
from penstock.actors.generator.core import EngineCore
from penstock.actors.generator.drafts import DraftIndex
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.requests import GenerationRequest
from penstock.actors.policy.config import NumericsConfig, PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.kernels import native
from penstock.messages.task import Sampling

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
NUM_TOKENS_MAX = 96


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def policy(mode="fast"):
    """A policy that repeats itself often, and not always."""
    config = PolicyConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=16,
        moe_intermediate_size=32,
        max_position_embeddings=NUM_TOKENS_MAX,
        numerics=NumericsConfig(mode=mode),
    )
    made = Policy(config, seed=0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.1)
    return made.requires_grad_(False)


def run(waves, num_drafts_max, *, mode="fast", num_threads=1):
    """Sample waves of requests one after the other; what each got, and the engine's counts."""
    options = EngineOptions(
        num_running_max=6,
        num_parked_max=4,
        num_tokens_max=NUM_TOKENS_MAX,
        prefill_tokens_max=16,
        num_threads=num_threads,
        num_drafts_max=num_drafts_max,
    )
    core = EngineCore(policy(mode).config, options)
    core.swap_model(core.decoder.prepare(policy(mode)), 0)
    chunks = {}
    for wave in waves:
        for request in wave():
            core.add(request)
            chunks[request.request_id] = []
        while core.waiting or core.num_running:
            for request, chunk in core.step():
                chunks[request.request_id].append(chunk)
    return {name: _joined(parts) for name, parts in chunks.items()}, core.metrics


def _joined(parts):
    assert [part.stop_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    return (
        np.concatenate([part.token_ids for part in parts]).tolist(),
        np.concatenate([part.behavior_logprobs for part in parts]).tobytes(),
        parts[-1].routed_experts.tobytes(),
        parts[-1].stop_reason,
        parts[-1].error,
    )


REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([0, 0, 0, 1, 2]),
        "seed": st.integers(0, 3),
        "temperature": st.sampled_from([0.0, 0.3, 0.3, 1.0]),
        "num_tokens_max": st.sampled_from([1, 2, 9, 30, 200]),
        "stop_token_ids": st.sampled_from([(), (7,), (3, 11, 29)]),
        "top_k": st.sampled_from([0, 0, 0, 5]),
        "session": st.sampled_from(["", "", "a", "b"]),
    }
)


def wave_of(number, drawn):
    def build():
        return [
            GenerationRequest(
                np.random.default_rng(each["prompt"]).integers(0, 60, 5 + 9 * each["prompt"]),
                Sampling(**{k: v for k, v in each.items() if k not in {"prompt", "session"}}),
                f"{number}.{index}",
                each["session"],
                0,
            )
            for index, each in enumerate(drawn)
        ]

    return build


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(REQUESTS, min_size=1, max_size=8), min_size=1, max_size=4),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from(["fast", "exact"]),
)
def test_drafts_change_nothing(drawn, num_drafts_max, num_threads, mode):
    waves = [wave_of(number, wave) for number, wave in enumerate(drawn)]
    plain, _ = run(waves, 0, mode=mode)
    drafted, metrics = run(waves, num_drafts_max, mode=mode, num_threads=num_threads)
    assert drafted == plain
    assert metrics.num_generated_tokens == sum(len(ids) for ids, *_ in plain.values())
    assert 0 <= metrics.num_accepted_tokens <= metrics.num_drafted_tokens


@needs_compiler
def test_attempts_at_one_task_draft_for_each_other():
    attempts = [{"prompt": 1, "seed": seed, "temperature": 0.3, "num_tokens_max": 60,
                 "stop_token_ids": (), "session": ""} for seed in range(24)]  # fmt: skip
    waves = [wave_of(number, attempts[number * 6 :][:6]) for number in range(4)]
    plain, without = run(waves, 0)
    drafted, metrics = run(waves, 8)
    assert drafted == plain
    assert without.num_drafted_tokens == without.num_accepted_tokens == 0
    # Some drafts hold and some do not: else this test would show little.
    assert metrics.num_generated_tokens // 4 < metrics.num_accepted_tokens
    assert metrics.num_accepted_tokens < metrics.num_drafted_tokens


def test_the_longest_known_end_decides():
    index = DraftIndex()
    index.record(np.array([1, 2, 3, 4, 5, 6, 7, 8, 20, 21], np.int32), 0)
    index.record(np.array([9, 6, 7, 8, 30, 31, 32], np.int32), 0)
    context = np.arange(1, 9, dtype=np.int32)
    assert index.propose(context, 8, frozenset()) == [20, 21]
    assert index.propose(context[5:], 8, frozenset()) == [30, 31, 32]
    assert index.propose(context[5:], 2, frozenset()) == [30, 31]
    assert index.propose(context[5:], 8, frozenset([31])) == [30]
    assert index.propose(context[5:], 8, frozenset([30])) == []
    assert index.propose(context[:3] + 40, 8, frozenset()) == []


def test_the_index_forgets(monkeypatch):
    monkeypatch.setattr(drafts, "_GENERATION_TOKENS", 100)
    index = DraftIndex()
    first = np.arange(30, dtype=np.int32)
    index.record(first, 0)
    for number in range(1, 40):
        assert len(index) <= 2 * (100 + 30)
        index.record(first + 1000 * number, 0)
        assert index.propose((first + 1000 * number)[:5], 2, frozenset())
    assert index.propose(first[:5], 2, frozenset()) == []
