"""What shaped the distribution is what is trained: k3 against the sampler, and gradients."""

import msgspec
import numpy as np
import pytest
import torch

from penstock.actors.generator.actor import _spans, seal_chunk
from penstock.actors.generator.core import EngineCore, NativeDecoder
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.requests import GenerationRequest
from penstock.actors.policy.config import NumericsConfig, PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.distribution import GreedyTurnError, NotReproducibleError
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.sequences import check_trajectory, training_sequence
from penstock.kernels.arrays import from_array, to_array
from penstock.kernels.support import open_support, seal_support, unpack_support
from penstock.messages.errors import CorruptDataError
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.task import Grammar, Sampling

VOCAB = 230
SETTINGS = {
    "T=0.2": {"temperature": 0.2},
    "T=0.7": {"temperature": 0.7},
    "T=1": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 7, "temperature": 0.7},
    "min_p": {"min_p": 0.05, "temperature": 1.3},
    "penalties": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "temperature": 0.7,
    },
    "bias": {"logit_bias": {3: 4.0, 17: -100.0, 99: 2.5}},
    "grammar": {"grammar": Grammar(text="odd ids")},
    "all": {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 2.0},
        "grammar": Grammar(text="odd ids", prefix_ids=(8, 4)),
    },
}


class OddIds:
    """A grammar of which every other token is a word, and one place has a single choice."""

    def __init__(self):
        self.num_accepted = 0

    def allowed(self):
        bits = np.full(-(-VOCAB // 8), 0b10101010, np.uint8)
        if self.num_accepted == 3:
            bits[:] = 0
            bits[2] = 1
        return bits

    def accept(self, token_id):
        self.num_accepted += 1


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def policy_in(mode, seed=0):
    config = PolicyConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, head_dim=16,
        moe_intermediate_size=32, max_position_embeddings=256, num_experts=6,
        tie_word_embeddings=False, numerics=NumericsConfig(mode=mode),
    )  # fmt: skip
    policy = Policy(config, seed=seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
        policy.head.mul_(5.0)
    return policy


def episode(policy, settings, seed=0, num_turns=2):
    """Two turns of one session, drawn with these settings."""
    core = EngineCore(policy.config, EngineOptions(num_tokens_max=256))
    core.swap_model(core.decoder.prepare(policy), 0)
    rng = np.random.default_rng(seed)
    context, turns = np.zeros(0, np.int32), []
    for index in range(num_turns):
        ids = rng.integers(0, VOCAB, 9).astype(np.int32)
        routes_from = max(len(context) - 1, 0)
        context = np.concatenate([context, ids])
        sampling = Sampling(seed=seed * 10 + index, num_tokens_max=30, **settings)
        request = GenerationRequest(
            context, sampling, f"t{index}", "s", routes_from,
            grammar=OddIds() if sampling.grammar else None,
        )  # fmt: skip
        request.begin(VOCAB)
        core.add(request)
        chunks = []
        while core.waiting or core.num_running:
            chunks += [chunk for _, chunk in core.step()]
        turns.append(turn_of(ids, chunks, sampling))
        context = np.concatenate([context, *(chunk.token_ids for chunk in chunks)])
    return turns


def turn_of(context_ids, chunks, sampling):
    token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
    supports = [chunk.support for chunk in chunks if chunk.support is not None]
    return Turn(
        context_ids=to_array(context_ids),
        token_ids=to_array(token_ids),
        behavior_logprobs=to_array(np.concatenate([c.behavior_logprobs for c in chunks])),
        version_spans=[VersionSpan(policy_version=0, num_tokens=len(token_ids))],
        stop_reason=StopReason.LENGTH,
        route_segments=seal_chunk(chunks[-1], 6),
        arithmetic="native/bf16",
        sampling=sampling,
        support=[seal_support(bits) for bits in supports],
        forced=_spans(np.concatenate([chunk.is_forced for chunk in chunks])),
    )


def batch_of(policy, settings, count=6):
    rollouts = [episode(policy, settings, seed) for seed in range(count)]
    for index, turns in enumerate(rollouts):
        check_trajectory(f"r{index}", turns, policy.config)
    return [training_sequence(f"r{i}", t, policy.config, 1.0) for i, t in enumerate(rollouts)]


def log_ratio(policy, batch):
    behavior = np.concatenate([sequence.behavior_logprobs for sequence in batch])
    current = SequenceForward(policy).run(batch).logprobs.detach().double().numpy()
    return current - behavior


def k3(ratio):
    return float((np.exp(ratio) - 1 - ratio).mean())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_in_exact_mode_the_trainer_has_the_samplers_bits(settings):
    policy = policy_in("exact")
    batch = batch_of(policy, settings)
    ratio = log_ratio(policy, batch)
    assert ratio.size > 250
    assert not ratio.any()
    assert k3(ratio) == 0.0


@pytest.mark.parametrize("step", ["native", "torch"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_in_fast_mode_the_trainer_is_near_both_steps(settings, step, monkeypatch):
    if step == "torch":
        monkeypatch.setattr(NativeDecoder, "load", lambda *_: None)
    policy = policy_in("fast")
    ratio = log_ratio(policy, batch_of(policy, settings, 3))
    assert np.abs(ratio).max() < 2e-3
    assert k3(ratio) < 1e-8


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "T=1"])
def test_what_was_not_used_would_show(name):
    policy = policy_in("exact")
    blind = []
    for seed in range(2):
        turns = [
            msgspec.structs.replace(turn, sampling=Sampling(), support=[])
            for turn in episode(policy, SETTINGS[name], seed)
        ]
        blind.append(training_sequence(f"r{seed}", turns, policy.config, 1.0))
    assert k3(log_ratio(policy, blind)) > 1e-3


def test_supports_are_the_samplers_at_other_weights_too():
    """A softmax over the recorded tokens at the trainer's logits (`actors/policy/shaping.py`)."""
    batch = batch_of(policy_in("fast"), SETTINGS["top_p"], 1)
    other = policy_in("fast", seed=1)
    [sequence] = batch
    output = other(
        torch.from_numpy(sequence.token_ids[:-1]),
        [sequence.num_inputs],
        torch.from_numpy(sequence.routed_experts.astype(np.int64)),
    )
    logits = other.logits(output.hidden)[sequence.sampled_at - 1]
    support = np.concatenate([unpack_support(d.support, VOCAB) for d in sequence.draws])
    assert 1 < support.sum(1).mean() < VOCAB / 2
    expected = torch.log_softmax(logits.masked_fill(torch.from_numpy(~support), -torch.inf), -1)
    targets = torch.from_numpy(sequence.token_ids[sequence.sampled_at])
    expected = expected.gather(1, targets.unsqueeze(1)).squeeze(1)
    found = SequenceForward(other).run(batch).logprobs
    assert torch.isfinite(found).all()
    np.testing.assert_allclose(found.detach().numpy(), expected.detach().numpy(), atol=2e-4)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_gradients_are_those_of_finite_differences(mode):
    """Of the mean log-probability, along its own gradient, under every setting at once."""
    policy = policy_in(mode)
    batch = batch_of(policy, SETTINGS["all"], 2)
    policy.zero_grad()
    SequenceForward(policy).run(batch).logprobs.mean().backward()
    gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    norm = float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values())))
    assert np.isfinite(norm) and norm > 1e-3
    step, values = 1e-3, []
    for sign in (1, -1):
        moved = policy_in("fast")
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                if name in gradients:
                    parameter.add_(gradients[name], alpha=sign * step / norm)
        values.append(SequenceForward(moved).run(batch).logprobs.double().mean().item())
    measured = (values[0] - values[1]) / (2 * step)
    assert measured == pytest.approx(norm, rel=0.05)


def test_forced_tokens_are_context():
    turns = episode(policy_in("exact"), SETTINGS["all"])
    assert turns[0].forced == [(0, 2), (5, 6)]
    config = policy_in("exact").config
    sequence = training_sequence("r", turns, config, 1.0)
    assert sequence.is_trained.size == 60
    assert sequence.sampled_at.size == 54
    forced_at = 9 + np.array([0, 1, 5])
    assert not np.isin(forced_at, sequence.sampled_at).any()
    logprobs = from_array(turns[0].behavior_logprobs)
    assert np.abs(logprobs[[0, 1, 5]]).max() < 1e-6


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"sampling": None}, NotReproducibleError, "nobody recorded"),
        ({"sampling": Sampling(temperature=0.0)}, GreedyTurnError, "temperature"),
        ({"sampling": Sampling(temperature=1e-8)}, NotReproducibleError, "temperature"),
        ({"sampling": Sampling(temperature=float("nan"))}, NotReproducibleError, "temperature"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, NotReproducibleError, "logit_bias"),
        ({"sampling": Sampling(top_p=0.9), "support": []}, NotReproducibleError, "support"),
        ({"arithmetic": "torch/bf16"}, NotReproducibleError, "native"),
        ({"support": [b"x"]}, CorruptDataError, "support"),
        ({"forced": [(3, 99)]}, ValueError, "forced"),
        ({"forced": [(0, 30)]}, None, ""),
    ],
)
def test_what_cannot_be_trained_is_typed(changes, error, match):
    policy = policy_in("exact")
    turns = episode(policy, SETTINGS["top_p"])
    turns[0] = msgspec.structs.replace(turns[0], **changes)
    if error is None:
        check_trajectory("r", turns, policy.config)
        return
    with pytest.raises(error, match=match):
        check_trajectory("r", turns, policy.config)


def test_a_support_without_the_token_is_malformed():
    policy = policy_in("exact")
    turns = episode(policy, SETTINGS["top_p"])
    bits = open_support(turns[0].support, 30, VOCAB).copy()
    token = int(from_array(turns[0].token_ids)[4])
    bits[4, token // 8] &= ~np.uint8(1 << token % 8)
    turns[0] = msgspec.structs.replace(turns[0], support=[seal_support(bits)])
    with pytest.raises(ValueError, match="every sampled token"):
        check_trajectory("r", turns, policy.config)
