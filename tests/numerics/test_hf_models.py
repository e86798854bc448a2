"""Models in and out: folders that transformers writes, and what it computes with ours."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.actors.generator import core
from penstock.actors.generator.requests import GenerationRequest
from penstock.actors.policy.checkpoint import hf_views, load_checkpoint, save_checkpoint
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import config_json, read_hf_config
from penstock.actors.policy.hf.weights import write_weights
from penstock.messages.task import Sampling

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS = Path(__file__).with_name("hf_configs")
SHAPE = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
DENSE = {
    "qwen3": transformers.Qwen3ForCausalLM,
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
}


def hf_model(kind, *, theta=10_000.0, tied=False, normalized=True):
    """A model whose every tensor matters, its norms and biases too."""
    rope = {"rope_type": "default", "rope_theta": theta}
    if kind == "llama3":
        kind, rope = "llama", rope | LLAMA3
    common = {**SHAPE, "rope_parameters": rope, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    if kind in DENSE:
        own = {"sliding_window": None} if kind == "mistral" else {}
        config = DENSE[kind].config_class(intermediate_size=96, **common, **own)
        model = DENSE[kind](config)
    else:
        config = transformers.Qwen3MoeConfig(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            norm_topk_prob=normalized,
            **common,
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model.eval()


def token_ids(count=48):
    return torch.randint(0, 120, (count,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same_logits(policy, model):
    ids = token_ids()
    ours = policy.logits(policy(ids, [len(ids)]).hidden)
    theirs = model(ids[None]).logits[0]
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def load_theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", [*DENSE, "llama3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("theta", "tied", "shard"),
    [(10_000.0, True, "5GB"), (5e5, False, "30KB"), (123.0, True, "9KB")],
)
def test_what_transformers_writes_has_its_logits_here(tmp_path, kind, theta, tied, shard):
    model = hf_model(kind, theta=theta, tied=tied, normalized=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    policy = load_checkpoint(tmp_path)
    assert policy.config.rope_theta == theta
    assert policy.config.is_dense == (kind != "qwen3_moe")
    assert_same_logits(policy, model)


@pytest.mark.parametrize("kind", [*DENSE, "llama3", "qwen3_moe"])
@pytest.mark.parametrize("step", ["native", "torch"])
def test_both_decoding_steps_sample_with_its_logprobs(tmp_path, monkeypatch, kind, step):
    if step == "torch":
        monkeypatch.setattr(core.NativeDecoder, "load", lambda *_: None)
    model = hf_model(kind, theta=5e5)
    model.save_pretrained(tmp_path)
    policy = load_checkpoint(tmp_path).requires_grad_(False)
    engine = core.EngineCore(policy.config, core.EngineOptions(num_tokens_max=96))
    if engine.decoder.name != step:
        pytest.skip("no C compiler")
    engine.swap_model(engine.decoder.prepare(policy), 0)
    prompt = token_ids().numpy()
    sampling = Sampling(temperature=1.0, num_tokens_max=40)
    engine.add(GenerationRequest(prompt, sampling, "r", "", 0))
    chunks = []
    while engine.waiting or engine.num_running:
        chunks += [chunk for _, chunk in engine.step()]
    sampled = torch.from_numpy(np.concatenate([chunk.token_ids for chunk in chunks])).long()
    found = torch.from_numpy(np.concatenate([chunk.behavior_logprobs for chunk in chunks]))
    with torch.no_grad():
        logits = model(torch.cat([token_ids(), sampled])[None]).logits[0, 47:-1]
    theirs = logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0]
    torch.testing.assert_close(found, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-4.51", "qwen3-4.57", "qwen3_moe-4.51", "qwen3_moe-4.57"])
def test_configurations_of_transformers_4(tmp_path, name):
    """As those versions wrote them, with rope_theta 1e6."""
    kind = name.partition("-")[0]
    tied = kind == "qwen3"
    hf_model(kind, theta=1e6, tied=tied).save_pretrained(tmp_path)
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    policy = load_checkpoint(tmp_path)
    assert policy.config.rope_theta == 1e6
    assert_same_logits(policy, load_theirs(tmp_path))


@pytest.mark.parametrize("kind", [*DENSE, "llama3", "qwen3_moe"])
def test_in_out_and_in_again(tmp_path, kind):
    hf_model(kind, theta=5e4).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    policy = load_checkpoint(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text(config_json(policy.config, "float32"))
    write_weights(tmp_path / "out", hf_views(policy), shard_bytes_max=10_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    again = load_checkpoint(tmp_path / "out")
    assert again.config == policy.config
    for name, view in hf_views(again).items():
        assert torch.equal(view, hf_views(policy)[name]), name
    assert_same_logits(policy, load_theirs(tmp_path / "out"))


def test_a_mtp_head_is_neither_saved_nor_promised(tmp_path):
    """vLLM reads every safetensors file of a folder without an index."""
    from penstock.actors.policy.model import Policy

    save_checkpoint(Policy(PolicyConfig(num_hidden_layers=1, mtp_num_heads=1), seed=0), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert "mtp" not in (tmp_path / "config.json").read_text()
    assert load_checkpoint(tmp_path).config.mtp_num_heads == 0


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    """As the 0.6B model of the Qwen3 family is published."""
    from safetensors.torch import load_file, save_file

    hf_model("qwen3", tied=True).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    load_checkpoint(tmp_path)
    state["lm_head.weight"][3, 4] += 1
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed"):
        load_checkpoint(tmp_path)


def test_a_missing_head_dim_is_what_each_architecture_takes(tmp_path):
    for name, head_dim in (("qwen3-4.51", 128), ("qwen3_moe-4.51", 8)):
        raw = json.loads((CONFIGS / f"{name}.json").read_text())
        del raw["head_dim"]
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert read_hf_config(tmp_path).head_dim == head_dim


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("llama", "attention_bias", True), ("llama", "mlp_bias", True),
     ("mistral", "sliding_window", 64), ("qwen2", "use_sliding_window", True),
     ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})],
)  # fmt: skip
def test_what_only_transformers_computes_is_left_to_it(tmp_path, kind, key, value):
    hf_model(kind).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
    assert read_hf_config(tmp_path).architecture == kind
