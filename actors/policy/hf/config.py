"""Strict reader and writer of a Hugging Face folder's `config.json`.

Every key is of one of three kinds: it defines the policy's shape, it must have the value that the
policy computes with, or it has no effect on the logits. Any other key or value is an error that
names it, because silently ignoring a key would give wrong logits. The reader accepts the spellings
of transformers 4.x (`rope_theta`, `torch_dtype`) and 5.x (`rope_parameters`, `dtype`,
`num_local_experts`); both versions can read what the writer produces.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from penstock.actors.policy.config import PolicyConfig, RopeScaling
from penstock.actors.policy.hf.foreign import faults_of, foreign_shape
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.parsing import parse_json

CONFIG_FILE = "config.json"
_CONFIG_BYTES_MAX = 1 << 20

_SHAPE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
"""Keys that are fields of `PolicyConfig` in every architecture."""
_SPARSE_SHAPE = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
_CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
_READ_APART = {"qwen3_moe": ("num_experts", "num_local_experts")}
_READ_APART_ALWAYS = (
    *("model_type", "head_dim", "rope_theta", "rope_parameters", "rope_scaling", "layer_types"),
    *("sliding_window", "use_sliding_window"),
)
_QWEN3_HEAD_DIM = 128
"""Default of `head_dim` in `Qwen3Config`; other families divide hidden size by heads instead."""

_COMPUTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, 0),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    "quantization_config": (None,),
}
"""Keys with a fixed meaning in the policy, and their allowed values."""

_WITHOUT_EFFECT = frozenset(
    (
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("initializer_range", "output_router_logits", "router_aux_loss_coef"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class"),
        *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
        *("return_dict", "output_hidden_states", "output_attentions"),
        *("max_window_layers", "is_llama_config", "transformers.js_config", "auto_mapping"),
        "intermediate_size",  # width of dense layers, which a sparse model does not have
    )
)
"""Keys that do not change the logits of a model whose other keys pass."""


log = logging.getLogger(__name__)


class ModelFormatError(PenstockError, ValueError):
    """A model folder that the policy cannot compute; the text names the file, key or tensor."""


def read_hf_config(folder: Path) -> PolicyConfig:
    """Read the `config.json` of a model that the policy or transformers can compute.

    Raises:
        ModelFormatError: There is no such file, or a key is unknown, missing, or has a value that
            the policy does not support; the text names it, its value and what was expected.

    """
    path = folder / CONFIG_FILE
    raw = read_json(path, _CONFIG_BYTES_MAX)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _CLASSES:
        return _foreign_config(path, raw)
    try:
        return _own_config(path, raw, model_type)
    except ModelFormatError as error:
        # Folders of the Qwen3 kind are the built-in policy's own exports, too: a fault is a fault.
        if model_type.startswith("qwen3"):
            raise
        log.info("%s; only transformers and vLLM compute it", error)
        return _foreign_config(path, raw)


def _own_config(path: Path, raw: Mapping[str, Any], model_type: str) -> PolicyConfig:
    """Read the config.json of a model that the built-in policy computes."""
    is_sparse = model_type == "qwen3_moe"
    names = (*_SHAPE, *(_SPARSE_SHAPE if is_sparse else ("intermediate_size",)))
    _check_keys(path, raw, model_type, names)
    _check_window(path, raw, model_type)
    # transformers leaves keys out whose value is the architecture's default.
    if not model_type.startswith("qwen3"):
        heads = _required(path, raw, "num_attention_heads")
        raw = {"tie_word_embeddings": False, "num_key_value_heads": heads, **raw}
    values = {name: _required(path, raw, name) for name in names}
    values |= _rope(path, raw)
    values["head_dim"] = _head_dim(path, raw, model_type)
    values["family"] = "qwen3" if is_sparse else model_type
    # The head is not part of the format.
    values["mtp_num_heads"] = 0
    if is_sparse:
        values["num_experts"] = _num_experts(path, raw)
    else:
        values |= {"num_experts": 0, "num_experts_per_tok": 0}
    return _policy_config(path, values)


def _foreign_config(path: Path, raw: Mapping[str, Any]) -> PolicyConfig:
    """Read the config.json of a model that only transformers computes.

    Transformers itself checks the remaining keys when it loads the model.
    """
    for fault in faults_of(raw):
        _refuse(path, raw, *fault)
    # DeepSeek splits each head into a part with and a part without rotary embedding.
    if "qk_rope_head_dim" in raw:
        parts = ("qk_rope_head_dim", "qk_nope_head_dim")
        head_dim = sum(_at_least_one(path, raw, name) for name in parts)
    else:
        head_dim = _head_dim(path, raw, str(raw["model_type"]))
    return _policy_config(path, foreign_shape(raw, head_dim))


def _policy_config(path: Path, values: Mapping[str, Any]) -> PolicyConfig:
    try:
        return msgspec.convert(values, PolicyConfig)
    except msgspec.ValidationError as error:
        raise ModelFormatError(f"{path}: {error}") from error


def read_json(path: Path, bytes_max: int) -> dict[str, Any]:
    """Read a JSON object of at most `bytes_max` bytes.

    Raises:
        ModelFormatError: There is no such file, it is too long, or it is not a JSON object.

    """
    if not path.is_file():
        raise ModelFormatError(f"{path}: no such file; expected the folder of a Hugging Face model")
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ModelFormatError(f"{path}: expected at most {bytes_max} bytes")
    try:
        return parse_json(data, dict[str, Any], path.name)
    except CodecError as error:
        raise ModelFormatError(f"{path}: expected a JSON object: {error}") from error


def config_json(config: PolicyConfig, dtype: str = "bfloat16", **extra: Any) -> str:
    """Return the text of a `config.json` for transformers 4.x and 5.x, vLLM and this project.

    Args:
        config: Shape of the policy; the multi-token-prediction head is left out.
        dtype: Dtype of the tensors in the folder.
        extra: Additional keys that do not affect the logits, such as `eos_token_id`.

    """
    model_type = config.family if config.is_dense else "qwen3_moe"
    width = ("intermediate_size",) if config.is_dense else _SPARSE_SHAPE
    names = (*_SHAPE, *width, "head_dim", "rope_theta")
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    scaling: dict[str, Any] | None = None
    if config.rope_scaling.factor != 1.0:
        scaling = {"rope_type": "llama3", **msgspec.structs.asdict(config.rope_scaling)}
    values |= {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        # In both spellings, so that transformers 4.x and 5.x find it.
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
        "rope_scaling": scaling,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if not config.is_dense:
        values |= {
            "num_experts": config.num_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return json.dumps(values | extra, indent=2, sort_keys=True)


def _check_keys(
    path: Path, raw: Mapping[str, Any], model_type: str, names: tuple[str, ...]
) -> None:
    """Check that all keys are known and that their values are supported."""
    allowed = {**_COMPUTED, "architectures": ([_CLASSES[model_type]], None)}
    known = {*names, *_READ_APART_ALWAYS, *_READ_APART.get(model_type, ()), *_WITHOUT_EFFECT}
    for key, value in raw.items():
        if key in allowed:
            # Types as well: in Python, 0 equals False.
            if not any(type(value) is type(good) and value == good for good in allowed[key]):
                _refuse(path, raw, key, " or ".join(map(json.dumps, allowed[key])))
        elif key not in known:
            _refuse(path, raw, key, f"no such key (not supported for {model_type} models)")
    types, num_layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
    if types is not None and not (full and len(types) == num_layers):
        _refuse(path, raw, "layer_types", f"{num_layers} times full_attention")


def _check_window(path: Path, raw: Mapping[str, Any], model_type: str) -> None:
    """Check that no sliding window is shorter than the context."""
    window, used = raw.get("sliding_window"), raw.get("use_sliding_window", False)
    if used is not False:
        _refuse(path, raw, "use_sliding_window", "false")
    # Of these families, only Mistral has a window without asking `use_sliding_window`.
    positions = raw.get("max_position_embeddings")
    is_long = isinstance(window, int) and isinstance(positions, int) and window >= positions
    if model_type == "mistral" and window is not None and not is_long:
        _refuse(path, raw, "sliding_window", "null, or at least max_position_embeddings")


def _rope(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return base and scaling of the rotary angles; if both spellings are there, they must agree.

    transformers 4.x has `rope_theta` and `rope_scaling`, 5.x has both in `rope_parameters`.
    """
    scaling = _scaling(path, "rope_scaling", raw.get("rope_scaling") or {})
    parameters = raw.get("rope_parameters")
    if parameters is None:
        return {"rope_theta": _required(path, raw, "rope_theta"), "rope_scaling": scaling}
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        _refuse(path, raw, "rope_parameters", "an object with rope_theta")
    theta = parameters["rope_theta"]
    if raw.get("rope_theta", theta) != theta:
        _refuse(path, raw, "rope_theta", f"{theta!r}, as in rope_parameters")
    found = _scaling(path, "rope_parameters", parameters)
    if raw.get("rope_scaling") and scaling != found:
        _refuse(path, raw, "rope_scaling", "the values of rope_parameters")
    return {"rope_theta": theta, "rope_scaling": found}


def _scaling(path: Path, name: str, found: Any) -> dict[str, Any]:
    """Return the fields of `RopeScaling`; none for the rope type `default`."""
    if not isinstance(found, dict):
        _refuse(path, {name: found}, name, "an object")
    kind = found.get("rope_type", found.get("type", "default"))
    fields = RopeScaling.__struct_fields__ if kind == "llama3" else ()
    if kind not in ("default", "llama3"):
        shown = {f"{name}.rope_type": kind}
        _refuse(path, shown, f"{name}.rope_type", "default or llama3, the types that are computed")
    for key, value in found.items():
        if key not in ("rope_theta", "rope_type", "type", *fields):
            shown = {f"{name}.{key}": value}
            _refuse(path, shown, f"{name}.{key}", f"no such key of the rope type {kind}")
    if missing := [key for key in fields if key not in found]:
        raise ModelFormatError(f"{path}: {name}.{missing[0]} is missing")
    return {key: found[key] for key in fields}


def _num_experts(path: Path, raw: Mapping[str, Any]) -> Any:
    """Return the number of experts; if both spellings are present, they must agree."""
    if "num_experts" not in raw:
        name = "num_local_experts" if "num_local_experts" in raw else "num_experts"
        return _at_least_one(path, raw, name)
    count = _at_least_one(path, raw, "num_experts")
    if raw.get("num_local_experts", count) != count:
        _refuse(path, raw, "num_local_experts", f"{count!r}, as in num_experts")
    return count


def _at_least_one(path: Path, raw: Mapping[str, Any], name: str) -> int:
    value = _required(path, raw, name)
    if type(value) is not int or value < 1:
        _refuse(path, raw, name, "an integer of at least 1")
    return value


def _head_dim(path: Path, raw: Mapping[str, Any], model_type: str) -> Any:
    if raw.get("head_dim") is not None:
        return raw["head_dim"]
    if model_type == "qwen3":
        return _QWEN3_HEAD_DIM
    hidden = _at_least_one(path, raw, "hidden_size")
    return hidden // _at_least_one(path, raw, "num_attention_heads")


def _required(path: Path, raw: Mapping[str, Any], name: str) -> Any:
    if name not in raw:
        raise ModelFormatError(f"{path}: {name} is missing")
    return raw[name]


def _refuse(path: Path, raw: Mapping[str, Any], key: str, expected: str) -> NoReturn:
    value = json.dumps(raw.get(key))
    shown = value if len(value) <= 200 else f"{value[:200]}..."
    raise ModelFormatError(f"{path}: {key} is {shown}, expected {expected}")
