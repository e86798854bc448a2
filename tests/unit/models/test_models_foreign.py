"""Models that transformers computes on ranks: what a run reads of their folders, and exports."""

import asyncio
import json

import numpy as np
import pytest
import torch
from tests.unit.models.test_models_export import CODE, export

from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, as_numpy
from penstock.actors.policy.hf.config import ModelFormatError, read_hf_config
from penstock.actors.policy.hf.stored import TOKENIZER_KEY
from penstock.actors.policy.hf.weights import find_weights, stored_shapes
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.infra.stores.directory import DirectoryStore

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 256,
}


def foreign_model(kind):
    torch.manual_seed(0)
    if kind == "glm4_moe":
        config = transformers.Glm4MoeConfig(**SHAPE, num_key_value_heads=2, head_dim=16)
    else:
        config = transformers.DeepseekV3Config(
            **SHAPE,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model.eval()


@pytest.fixture(params=["glm4_moe", "deepseek_v3"])
def folder(request, tmp_path):
    foreign_model(request.param).save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def changed(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_its_shape_is_read_and_names_the_architecture(folder):
    config = read_hf_config(folder)
    assert config.architecture == folder.name
    assert config.is_foreign
    assert not config.is_dense
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)
    assert (config.vocab_size, config.num_hidden_layers) == (120, 2)
    assert config.head_dim == {"glm4_moe": 16, "deepseek_v3": 24}[folder.name]
    assert find_weights(folder, stored_shapes(folder)).files


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"embd_pdrop": 0.1}, "embd_pdrop"),
        ({"model_type": "unheard_of"}, "model_type.*router is known: deepseek_v3"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "architectures.*causal language"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"n_routed_experts": None}, "num_experts"),
        ({"rope_parameters": 3, "rope_theta": []}, "rope_theta"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(folder, keys, named):
    changed(folder, **keys)
    with pytest.raises(ModelFormatError, match=named):
        read_hf_config(folder)


async def publish(run, folder):
    """A run's folder as far as an export reads it."""
    (run / "config.toml").write_text("")
    store = DirectoryStore(run / "objects")
    tokenizer = train_tokenizer([CODE], vocab_size=400)
    await store.put(TOKENIZER_KEY, tokenizer.to_json().encode())
    snapshot = {}
    for name, shape in stored_shapes(folder).items():
        values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        is_bias = name.endswith("e_score_correction_bias")
        snapshot[name] = as_numpy(values if is_bias else values.to(PUBLISHED_DTYPE))
    text = (folder / "config.json").read_text()
    await Publisher(StoreIO(store)).prepare(0, snapshot, optimizer_step=0, config_json=text)
    return snapshot


async def test_an_export_is_a_folder_of_its_architecture(folder, tmp_path):
    run = tmp_path / "runs" / "r1"
    run.mkdir(parents=True)
    snapshot = await publish(run, folder)
    done = await asyncio.to_thread(export, run, "-o", str(tmp_path / "out"))
    assert done == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == folder.name
    assert model.config.num_nextn_predict_layers == 0
    gate = model.get_submodule("model.layers.1.mlp.gate")
    expected = snapshot["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(gate.e_score_correction_bias.float().numpy(), expected)
    expected = snapshot["model.layers.1.mlp.experts.3.up_proj.weight"]
    fused = model.get_submodule("model.layers.1.mlp.experts").gate_up_proj[3, 24:]
    np.testing.assert_array_equal(as_numpy(fused), expected)
