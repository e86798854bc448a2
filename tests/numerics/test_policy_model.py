"""The policy's numbers: against transformers, against itself, and run to run."""

import msgspec
import pytest
import torch
from torch.nn import functional as F

from penstock.actors.policy.checkpoint import (
    hf_views,
    load_checkpoint,
    load_published,
    publishable_state,
    save_checkpoint,
    state_digest,
)
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.experts import ExpertMlp
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.kernels.reference.routing import ROUTE_FREE

SMALL = PolicyConfig(
    vocab_size=120, hidden_size=32, num_hidden_layers=2, head_dim=16, moe_intermediate_size=48
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lively(config=SMALL, seed=0):
    """A policy whose every tensor matters: fresh norms are all ones."""
    policy = Policy(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1)
    return policy


def token_ids(count, config=SMALL, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (count,), generator=generator)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_transformers_gives_equal_logits(tmp_path, tie):
    transformers = pytest.importorskip("transformers")
    config = PolicyConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=16,
        moe_intermediate_size=48,
        norm_topk_prob=not tie,
        tie_word_embeddings=tie,
    )
    policy = lively(config)
    save_checkpoint(policy, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    ids = token_ids(40, config)
    with torch.no_grad():
        ours = policy.logits(policy(ids, [25, 15]).hidden)
        expected = torch.cat([theirs(ids[None, :25]).logits[0], theirs(ids[None, 25:]).logits[0]])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_forward_and_backward_give_the_same_bits_every_time():
    policy, ids, lengths = lively(), token_ids(90), [40, 30, 20]

    def gradients():
        policy.zero_grad()
        output = policy(ids, lengths)
        loss = -token_logprobs(policy.logits(output.hidden), ids).mean() + output.balance_loss
        mtp = policy.logits(policy.mtp_hidden(output.hidden[:-2], ids[1:-1]))
        (loss - token_logprobs(mtp, ids[2:]).mean()).backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters()}

    first = gradients()
    assert all(gradient.abs().max() > 0 for gradient in first.values())
    for _ in range(3):
        assert state_digest(gradients()) == state_digest(first)


def test_packing_leaves_sequences_apart():
    policy, ids = lively(), token_ids(50)
    with torch.no_grad():
        packed = policy(ids, [20, 30]).hidden
        apart = torch.cat([policy(ids[:20], [20]).hidden, policy(ids[20:], [30]).hidden])
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


def test_replaying_the_recorded_routes_changes_nothing():
    policy, ids = lively(), token_ids(50)
    free = policy(ids, [50])
    replayed = policy(ids, [50], free.routed_experts)
    assert torch.equal(free.hidden, replayed.hidden)
    assert torch.equal(free.routed_experts, replayed.routed_experts)
    assert replayed.router_mismatch == 0.0


def test_replay_overrides_ids_and_still_trains_the_router():
    policy, ids = lively(), token_ids(50)
    free = policy(ids, [50]).routed_experts
    other = (free + 1) % SMALL.num_experts
    other[30:] = ROUTE_FREE
    output = policy(ids, [50], other)
    assert torch.equal(output.routed_experts[:30], other[:30])
    assert 0.0 < output.router_mismatch <= 1.0
    output.hidden.square().sum().backward()
    assert all(layer.router.weight.grad.abs().max() > 0 for layer in policy.layers)


def test_expert_gradients_match_finite_differences():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    ids = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2], [0, 1]])
    inputs = (draw(5, 6), ids, draw(5, 2), draw(4, 8, 6), draw(4, 6, 4))
    assert torch.autograd.gradcheck(ExpertMlp.apply, inputs)


def test_expert_layer_matches_its_definition():
    policy = lively()
    layer, x = policy.layers[0].experts, torch.randn(7, 32)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    expected = torch.zeros_like(x)
    for t in range(7):
        for k in range(2):
            gate, up = (layer.gate_up[ids[t, k]] @ x[t]).chunk(2)
            expected[t] += weights[t, k] * (layer.down[ids[t, k]] @ (F.silu(gate) * up))
    torch.testing.assert_close(layer(x, ids, weights), expected, rtol=1e-4, atol=1e-5)


def test_published_weights_round_once_and_digest_equal():
    policy, other = lively(), Policy(SMALL)
    state = publishable_state(policy)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    load_published(other, state)
    assert state_digest(publishable_state(other)) == state_digest(state)
    assert state_digest(dict(reversed(state.items()))) == state_digest(state)
    name = next(iter(state))
    state[name].view(torch.uint16).view(-1)[3] ^= 1
    assert state_digest(publishable_state(other)) != state_digest(state)


def test_checkpoint_round_trip_is_exact(tmp_path):
    policy = lively()
    save_checkpoint(policy, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == msgspec.structs.replace(policy.config, mtp_num_heads=0)
    parameters = dict(policy.named_parameters())
    for name, theirs in loaded.named_parameters():
        assert torch.equal(parameters[name], theirs), name
    assert not list(tmp_path.glob("*.tmp"))


def test_bad_checkpoints_are_refused(tmp_path):
    policy = lively()
    save_checkpoint(policy, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_checkpoint(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: no such file, and no index"):
        load_checkpoint(tmp_path)


def test_a_state_that_does_not_fit_is_refused():
    policy = lively()
    state = publishable_state(policy)
    with pytest.raises(ValueError, match="missing"):
        load_published(policy, {})
    name = next(iter(hf_views(policy)))
    with pytest.raises(ValueError, match=name):
        load_published(policy, state | {name: torch.zeros(3)})


def test_bad_inputs_are_refused():
    policy, ids = lively(), token_ids(10)
    for lengths in ([9], [10, 0], [5, 6]):
        with pytest.raises(ValueError, match="lengths"):
            policy(ids, lengths)
    with pytest.raises(ValueError, match="routed_experts"):
        policy(ids, [10], torch.zeros(10, 1, 2, dtype=torch.int16))
    with pytest.raises(ValueError, match="num_experts"):
        policy(ids, [10], torch.full((10, 2, 2), 8))
    for change in ({"num_key_value_heads": 3}, {"head_dim": 0}, {"num_experts_per_tok": 9}):
        with pytest.raises(msgspec.ValidationError, match=next(iter(change))):
            msgspec.convert(change, PolicyConfig)
