"""Attacks by a model folder: what config.json, the index and the weights' heads claim."""

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.actors.policy.checkpoint import load_checkpoint, save_checkpoint
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import ModelFormatError, config_json, read_hf_config
from penstock.actors.policy.hf.weights import INDEX_FILE, write_weights
from penstock.actors.policy.model import Policy

SPARSE = PolicyConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, head_dim=8, moe_intermediate_size=16
)
DENSE = PolicyConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    head_dim=8,
    num_experts=0,
    num_experts_per_tok=0,
    intermediate_size=24,
)


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(Policy(SPARSE, seed=0), tmp_path)
    return tmp_path


@pytest.fixture
def sharded(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_weights(folder, state, shard_bytes_max=20_000)
    return folder


def changed(folder, key, value):
    raw = json.loads((folder / "config.json").read_text())
    raw[key] = value
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model_type", "jetmoe", "one whose router is known"),
        ("model_type", ["qwen3"], "the name of an architecture"),
        ("architectures", ["Qwen3MoeForSequenceClassification"], "Qwen3MoeForCausalLM"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "default or llama3"),
        ("rope_theta", 123.0, "10000.0, as in rope_parameters"),
        (
            "rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4},
            "default or llama3",
        ),
        ("rope_parameters", [1], "an object with rope_theta"),
        ("use_sliding_window", True, "false"),
        ("layer_types", ["sliding_attention"], "1 times full_attention"),
        ("layer_types", ["full_attention"] * 2, "1 times full_attention"),
        ("mlp_only_layers", [0], r"\[\] or null"),
        ("decoder_sparse_step", 2, "1"),
        ("attention_bias", True, "false"),
        ("attention_bias", 0, "false"),
        ("hidden_act", "gelu", '"silu"'),
        ("quantization_config", {"quant_method": "fp8"}, "null"),
        ("num_local_experts", 7, "8, as in num_experts"),
        ("num_nextn_predict_layers", 1, "no such key"),
        ("mtp_num_heads", 1, "no such key"),
        ("num_experts", 0, "at least 1"),
        ("num_experts", True, "at least 1"),
    ],
)
def test_a_value_that_is_not_computed_is_refused_by_name(folder, key, value, expected):
    changed(folder, key, value)
    with pytest.raises(ModelFormatError, match=rf"config\.json: {key}.*expected.*{expected}"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("vocab_size", -1),
        ("max_position_embeddings", 2**40),
        ("head_dim", 3),
        ("num_experts", 2**20),
        ("num_attention_heads", 2**30),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "yes"),
        ("num_experts_per_tok", 9),
    ],
)
def test_a_claimed_size_is_bounded_before_anything_is_allocated(folder, key, value):
    changed(folder, key, value)
    with pytest.raises(ModelFormatError, match=key):
        load_checkpoint(folder)


def test_a_claimed_size_that_the_weights_do_not_have_allocates_nothing(folder):
    changed(folder, "vocab_size", 2**22)
    changed(folder, "hidden_size", 2**20)
    with pytest.raises(ModelFormatError, match=r"shape \[.*\], expected \[4194304, 1048576\]"):
        load_checkpoint(folder)


@pytest.mark.parametrize("key", ["vocab_size", "rms_norm_eps", "tie_word_embeddings"])
def test_a_missing_key_is_named(folder, key):
    raw = json.loads((folder / "config.json").read_text())
    del raw[key]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelFormatError, match=f"{key} is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b'{"model_type": NaN}', b"\xff\xfe", b'{"a":' * 5000, b" " * (2 << 20)],
    ids=["empty", "list", "null", "nan", "utf16", "deep", "long"],
)
def test_a_configuration_that_is_no_object_is_refused(folder, data):
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"config\.json: expected"):
        read_hf_config(folder)


@given(
    st.dictionaries(
        st.sampled_from([*sorted(json.loads(config_json(SPARSE))), "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=150, deadline=None)
def test_any_configuration_is_read_or_refused_by_the_one_error(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("model")
    raw = json.loads(config_json(SPARSE)) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        read_hf_config(folder)
    except ModelFormatError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin",
                                  ".hidden.safetensors", "..", 7, "a\0.safetensors"])  # fmt: skip
def test_an_index_names_files_of_its_folder_only(sharded, name):
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match="file of the same folder"):
        load_checkpoint(sharded)


def test_a_shard_that_is_missing_is_named_with_a_tensor(sharded):
    victim = sorted(sharded.glob("model-*"))[1]
    victim.unlink()
    with pytest.raises(
        ModelFormatError, match=rf"{victim.name}: no such file, but .* assigns model"
    ):
        load_checkpoint(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, []])
def test_an_index_without_a_map_is_refused(sharded, index):
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=r"index\.json"):
        load_checkpoint(sharded)


def test_an_index_that_lies_about_a_shard_is_refused(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    names = sorted(index["weight_map"])
    index["weight_map"][names[0]] = index["weight_map"][names[-1]]
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match="the tensors differ from those in"):
        load_checkpoint(sharded)


def test_two_sets_of_weights_are_refused(sharded):
    save_file({"a": torch.zeros(1)}, sharded / "model.safetensors")
    with pytest.raises(ModelFormatError, match="not both"):
        load_checkpoint(sharded)


def with_state(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


GATE = "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.pop(GATE), f"1 tensors are missing, e.g. {GATE}"),
        (lambda s: s.update(extra=torch.zeros(2)), "the model has no tensor 'extra'"),
        (lambda s: s.update({GATE: torch.zeros(8, 15)}), rf"{GATE} has shape \[8, 15\].*\[8, 16\]"),
        (lambda s: s.update({GATE: s[GATE].double()}), f"{GATE} is F64, expected one of F32"),
        (lambda s: s.update({GATE: s[GATE].to(torch.int8)}), f"{GATE} is I8, expected"),
        (lambda s: s[GATE].fill_(float("nan")), f"{GATE} has NaN or infinite values"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, expected):
    with_state(folder, change)
    with pytest.raises(ModelFormatError, match=expected):
        load_checkpoint(folder)


def lying(header, size=None, body=b""):
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data) if size is None else size) + data + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        lying({}, size=2**63),
        lying({GATE: {"dtype": "F32", "shape": [8, 16], "data_offsets": [0, 2**60]}}),
        lying({GATE: {"dtype": "F32", "shape": [2**62, 9], "data_offsets": [0, 4]}}, body=b"abcd"),
        lying({GATE: {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}),
        lying({GATE: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
               "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, body=b"abcd"),
    ],
    ids=["empty", "noise", "long head", "far", "huge", "negative", "overlap"],
)  # fmt: skip
def test_a_lying_head_is_refused(folder, data):
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_does_not_block(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelFormatError, match=name):
        load_checkpoint(folder)


def test_a_dense_model_has_no_keys_of_experts(tmp_path):
    save_checkpoint(Policy(DENSE, seed=0), tmp_path)
    load_checkpoint(tmp_path)
    changed(tmp_path, "num_experts", 8)
    with pytest.raises(ModelFormatError, match="num_experts is 8, expected no such key"):
        load_checkpoint(tmp_path)
