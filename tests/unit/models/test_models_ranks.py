"""Which settings train and sample a model that transformers computes on ranks."""

import json
from pathlib import Path

import pytest

from penstock.infra.config.file import apply_overrides, parse_config, read_toml
from penstock.infra.models.claim import fill_shape
from penstock.infra.ranks.arithmetic import arithmetic_of, replay_refusal
from penstock.messages.control import Arithmetic
from penstock.messages.errors import ConfigError

QUICKSTART = Path("examples/quickstart/config.toml")
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
GLM = SHAPE | {"model_type": "glm4_moe", "n_routed_experts": 8}
QWEN = SHAPE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
RANKS = (
    "trainer.engine=ranks",
    "trainer.ranks.model=transformers",
    'processes.rank-0=["rank:0"]',
    'processes.rank-1=["rank:1"]',
)
VLLM = ("generator.engine=vllm",)
OTHERS = (
    "model.chat=renderers:qwen3",
    "generator.num_tokens_max=4096",
    "trainer.midtrain.num_tokens=0",
)


def read(folder, config, *overrides):
    """The configuration of a run from a folder with this config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    given = (f"model.checkpoint={folder}", *OTHERS, *overrides)
    data = apply_overrides(read_toml(QUICKSTART), given)
    fill_shape(data)
    return parse_config(data, "test")


def test_another_architecture_is_trained_on_ranks_and_sampled_by_vllm(tmp_path):
    config = read(tmp_path, GLM, *RANKS, *VLLM)
    assert config.policy.architecture == "glm4_moe"
    assert config.trainer.ranks.num_expert_ranks == 1
    read(tmp_path, GLM, *RANKS, *VLLM, "trainer.ranks.num_expert_ranks=2")


def test_qwen_may_be_trained_by_transformers_and_sampled_by_the_native_engine(tmp_path):
    assert read(tmp_path, QWEN, *RANKS).policy.architecture == ""


@pytest.mark.parametrize(
    ("config", "overrides", "text"),
    [
        (GLM, (), "trainer.engine: expected .*glm4_moe"),
        (GLM, RANKS[:1] + RANKS[2:] + VLLM, "trainer.engine: expected .*glm4_moe"),
        (GLM, RANKS, "generator.engine: expected 'vllm'.*glm4_moe.*got 'native'"),
        (QWEN, (*RANKS, "policy.numerics.mode=exact"), "numerics.mode: expected 'fast' or 'off'"),
        (QWEN, (*RANKS, "policy.numerics.expert_format=mxfp8"), "expert_format: expected 'bf16'"),
        (QWEN, (*RANKS, "policy.numerics.plausible=0.5"), "plausible: expected 0.0"),
        (QWEN, (*RANKS, "trainer.ranks.num_expert_ranks=3"), "num_expert_ranks: expected a divis"),
        (
            QWEN | {"num_experts": 5},
            (*RANKS, "trainer.ranks.num_expert_ranks=2"),
            "num_expert_ranks: expected a divisor of the model's 5 experts",
        ),
        (QWEN, ("trainer.ranks.num_expert_ranks=2",), "num_expert_ranks: expected 1 with"),
        (QWEN, (*RANKS, "trainer.ranks.dtype=bfloat16"), "probe_tolerance: expected at least"),
        (QWEN, ("trainer.ranks.dtype=bfloat16",), "trainer.ranks.dtype: expected it with"),
    ],
)
def test_what_nobody_computes_is_refused_by_name(tmp_path, config, overrides, text):
    with pytest.raises(ConfigError, match=text):
        read(tmp_path, config, *overrides)


def test_a_replay_by_one_process_is_refused_where_bits_depend_on_several():
    assert replay_refusal(Arithmetic(engine="ranks", num_ranks=4)) == ""
    divided = Arithmetic(engine="ranks", num_ranks=4, layout="4 ranks, experts over 2")
    assert "4 ranks, experts over 2" in replay_refusal(divided)


def test_the_division_of_experts_is_recorded(tmp_path):
    config = read(tmp_path, QWEN, *RANKS, "trainer.ranks.num_expert_ranks=2")
    pytest.importorskip("transformers")
    found = arithmetic_of(config)
    assert found.layout == "2 ranks, experts over 2"
    assert found.model.startswith("transformers 5")
    assert arithmetic_of(read(tmp_path, QWEN, *RANKS)).layout == ""


def test_transformers_needs_a_folder():
    data = apply_overrides(read_toml(QUICKSTART), RANKS)
    with pytest.raises(ConfigError, match="expected a folder"):
        parse_config(data, "test")
