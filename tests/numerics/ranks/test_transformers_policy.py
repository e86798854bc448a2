"""Models of transformers in the place of the own policy: packed trees, recorded routes, tensors."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.ranks.batches import manifest, rollouts

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.operations import token_logprobs
from penstock.actors.policy.packing import pack_tree
from penstock.actors.policy.probe import greedy_logprobs, probe_policy, probe_prompts

transformers = pytest.importorskip("transformers", minversion="5.23")
pytestmark = pytest.mark.filterwarnings("ignore")

from penstock.actors.trainer.config import OptimizerConfig, TrainerConfig  # noqa: E402
from penstock.actors.trainer.engines.config import RanksConfig  # noqa: E402
from penstock.actors.trainer.ranks.hf.attention import NAME  # noqa: E402
from penstock.actors.trainer.ranks.hf.learner import TransformersLearner  # noqa: E402
from penstock.actors.trainer.ranks.hf.policy import TransformersPolicy  # noqa: E402
from penstock.actors.trainer.ranks.hf.tensors import TensorNames  # noqa: E402
from penstock.actors.trainer.ranks.world import World  # noqa: E402
from penstock.actors.trainer.step import train_step  # noqa: E402

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
SIGMOID = {"n_routed_experts": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
RANKS = RanksConfig(num_ranks=1, model="transformers")
NUM_EXPERTS, NUM_LAYERS, NUM_CHOSEN = 8, 3, 2


def config_of(kind):
    if kind == "qwen3_moe":
        heads = {"num_key_value_heads": 2, "head_dim": 8}
        return transformers.Qwen3MoeConfig(**SHAPE, **heads, num_experts=8, norm_topk_prob=True)
    if kind == "glm4_moe":
        heads = {"num_key_value_heads": 2, "head_dim": 8}
        return transformers.Glm4MoeConfig(**SHAPE, **heads, **SIGMOID, norm_topk_prob=True)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    heads = {"qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
    groups = {"n_group": 4, "topk_group": 2}
    return transformers.DeepseekV3Config(**SHAPE, **SIGMOID, **latent, **heads, **groups)


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe", "deepseek_v3"])
def policy(request):
    torch.manual_seed(0)
    model = made(config_of(request.param))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.5)
    shape = PolicyConfig(vocab_size=96, hidden_size=32, num_hidden_layers=3, num_experts=8,
                         max_position_embeddings=128)  # fmt: skip
    return policy_of(model, shape)


def made(config):
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).float()


def policy_of(model, shape):
    return TransformersPolicy(model.train(), shape, RANKS, torch.device("cpu"))


def sequences(rng):
    """Three sequences, of which two begin alike."""
    shared = rng.integers(0, 96, 20)
    parts = [np.concatenate([shared, rng.integers(0, 96, n)]) for n in (9, 14)]
    parts.append(rng.integers(0, 96, 17))
    chosen = [rng.permutation(NUM_EXPERTS)[:NUM_CHOSEN] for _ in range(40 * NUM_LAYERS)]
    common = np.array(chosen).reshape(40, NUM_LAYERS, NUM_CHOSEN)
    own = [np.roll(common, n, axis=0) for n in (7, 11)]
    routes = [
        np.concatenate([common[:20], o[20 : len(p)]]) for o, p in zip(own, parts, strict=False)
    ]
    return parts, [*routes, common[: len(parts[2])]]


def logprobs(policy, parts, routes):
    tree = pack_tree(parts, routes)
    output = policy(
        torch.from_numpy(tree.input_ids),
        tree.lengths,
        torch.from_numpy(tree.routed_experts),
        tree.parents,
    )
    rows = torch.from_numpy(np.concatenate([places[:-1] for places in tree.places]))
    targets = torch.from_numpy(np.concatenate([part[1:] for part in parts]))
    return token_logprobs(policy.logits(output.hidden.index_select(0, rows)), targets), tree


def test_a_tree_gives_what_its_sequences_give_apart(policy):
    parts, routes = sequences(np.random.default_rng(0))
    together, tree = logprobs(policy, parts, routes)
    assert any(parent >= 0 for parent in tree.parents)
    apart = [logprobs(policy, [p], [r])[0] for p, r in zip(parts, routes, strict=True)]
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=0)


def test_the_routers_own_choice_replayed_changes_nothing(policy):
    ids = torch.arange(5, 45)
    free = policy(ids, [40])
    own = free.routed_experts.long()
    backwards = policy(ids, [40], own.flip(2))
    assert backwards.flips.tolist() == [0, 0, 0]
    torch.testing.assert_close(backwards.hidden, free.hidden, atol=1e-6, rtol=0)


def test_other_routes_are_used_and_have_gradients_of_their_own(policy):
    ids = torch.arange(5, 45)
    free = policy(ids, [40])
    other = (free.routed_experts.long() + 1) % NUM_EXPERTS
    output = policy(ids, [40], other)
    assert torch.equal(output.routed_experts.long()[:, 1:], other[:, 1:])
    assert output.router_mismatch > 0.3
    assert (output.hidden - free.hidden).abs().max() > 1e-3
    policy.logits(output.hidden).logsumexp(-1).sum().backward()
    gates = [p.grad for name, p in policy.named_parameters() if name.endswith("mlp.gate.weight")]
    assert all(gate is not None and gate.abs().max() > 0 for gate in gates)


def test_a_row_that_recorded_nothing_routes_freely(policy):
    ids = torch.arange(5, 45)
    free = policy(ids, [40])
    recorded = torch.full((40, NUM_LAYERS, NUM_CHOSEN), -1)
    output = policy(ids, [40], recorded)
    assert torch.equal(output.hidden, free.hidden)
    assert output.num_recorded == 0


def test_checkpointed_activations_give_the_same_gradient(policy):
    ids, found = torch.arange(5, 45), []
    recorded = (policy(ids, [40]).routed_experts.long() + 3) % NUM_EXPERTS
    for checkpoints in (False, True):
        policy.checkpoints_activations = checkpoints
        policy.zero_grad()
        policy.logits(policy(ids, [40], recorded).hidden).logsumexp(-1).sum().backward()
        found.append([p.grad.clone() for _, p in policy.named_parameters() if p.grad is not None])
    policy.checkpoints_activations = False
    assert len(found[0]) == len(found[1])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed, atol=1e-6, rtol=1e-5)


def test_the_probe_is_what_the_model_computes(policy):
    found = torch.tensor(probe_policy(policy))
    prompts = torch.from_numpy(np.array(probe_prompts(96)))
    expected = torch.cat([alone(policy, prompt) for prompt in prompts.long()])
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def alone(policy, prompt):
    logits = policy.logits(policy(prompt, [len(prompt)]).hidden[-1:])
    return torch.tensor(greedy_logprobs(logits))


def test_workers_change_nothing_as_passes_come_one_after_the_other(policy):
    """Routes of two passes at once met in one router: a replay on all cores failed."""
    found = []
    for num_workers in (1, 2):
        model = copy.deepcopy(policy.model)
        own = policy_of(model, policy.config)
        learner = TransformersLearner(own, OptimizerConfig(), World.alone("cpu"), RANKS)
        turns = rollouts(policy.config, 1)
        config = TrainerConfig(micro_batch_tokens=64, num_workers=num_workers)
        found.append(train_step(learner, manifest(turns, 1), turns, config))
    assert found[0] == found[1]


def test_a_sequence_that_is_too_long_is_refused(policy):
    with pytest.raises(ValueError, match="129 tokens exceeds max_position_embeddings 128"):
        policy(torch.zeros(129, dtype=torch.int64), [129])


def test_what_is_published_has_the_names_and_shapes_that_transformers_writes(policy, tmp_path):
    policy.model.save_pretrained(tmp_path)
    from penstock.actors.policy.hf.weights import stored_shapes

    written = {name: list(shape) for name, shape in stored_shapes(tmp_path).items()}
    names = TensorNames(policy.model)
    assert names.shapes() == written
    runs = names.held_runs(is_first=True)
    sizes = {run.name: run.values.size for run in runs}
    assert sizes == {name: math.prod(shape) for name, shape in written.items()}


@pytest.fixture(scope="module")
def names():
    config = transformers.MixtralConfig(
        **{name: SHAPE[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")},
        num_hidden_layers=1,
        num_key_value_heads=2,
        intermediate_size=16,
        num_local_experts=9,
    )
    return TensorNames(made(config))


@given(
    name=st.sampled_from(["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]),
    cuts=st.lists(st.integers(0, 9), max_size=4),
)
def test_any_cut_by_rows_holds_every_element_once(names, name, cuts):
    name = f"model.layers.0.{name}"
    shape = (9, 2) if name.endswith("gate.weight") else (9, 4, 3)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    bounds = sorted({0, 9, *cuts})
    found: dict[str, list[tuple[int, int]]] = {}
    for first, end in pairwise(bounds):
        for tensor, start, values in names.runs(name, whole[first:end], first):
            found.setdefault(tensor, []).extend(enumerate(values.reshape(-1).tolist(), start))
    expected = {each: part.reshape(-1).tolist() for each, _, part in names.runs(name, whole, 0)}
    assert {tensor: [v for _, v in sorted(at)] for tensor, at in found.items()} == expected
    for at in found.values():
        assert [place for place, _ in sorted(at)] == list(range(len(at)))


def test_experts_are_named_as_their_family_stores_them(names):
    found = names.shapes()
    prefix = "model.layers.0.block_sparse_moe.experts.8"
    assert [found[f"{prefix}.w{n}.weight"] for n in (1, 2, 3)] == [[16, 32], [32, 16], [16, 32]]
    runs = names.runs("model.layers.0.mlp.experts.gate_up_proj", torch.arange(4.0).view(1, 4, 1), 8)
    assert [(name, part.flatten().tolist()) for name, _, part in runs] == [
        (f"{prefix}.w1.weight", [0.0, 1.0]),
        (f"{prefix}.w3.weight", [2.0, 3.0]),
    ]
