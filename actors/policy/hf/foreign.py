"""Configurations of models that only transformers and vLLM can compute.

Such a model is trained with `[trainer.ranks] model = "transformers"` and sampled with vLLM. Both
read the folder's own `config.json`, as do users of an export. The rest of a run only needs a
`PolicyConfig` that names the architecture. Before a rank trains it, `ranks/hf/checks.py` compares
what it computes with what transformers does.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_REQUIRED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
"""Keys with the same name as a field of `PolicyConfig`, which a config.json must have."""
ROUTED_TYPES = (
    *("deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "mixtral"),
    *("olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next"),
)
"""Values of `model_type` whose routers `actors/trainer/ranks/hf/routing.py` replays, beside the
built-in policy's. A model without experts may be of any type that transformers loads."""
_RANDOM = ("dropout", "pdrop", "jitter")
"""Parts of keys whose value, if not 0, makes a forward pass random."""


def faults_of(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a config.json that rule training out, and what was expected of each."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or not kind:
        yield "model_type", "the name of an architecture"
    for name in ("quantization_config", "auto_map"):
        if raw.get(name) is not None:
            yield name, "null (an unquantized model whose code is part of transformers)"
    classes = raw.get("architectures") or ["ForCausalLM"]
    if not isinstance(classes, list) or not str(classes[0]).endswith("ForCausalLM"):
        yield "architectures", "a causal language model (a class named ...ForCausalLM)"
    for name, value in raw.items():
        if any(part in name for part in _RANDOM) and isinstance(value, int | float) and value:
            yield name, "0.0"
    for name in _REQUIRED:
        if type(raw.get(name)) is not int:
            yield name, "an integer"
    if _routes(raw) and kind not in ROUTED_TYPES:
        yield "model_type", f"one whose router is known: {', '.join(ROUTED_TYPES)}"


def foreign_shape(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the fields of `PolicyConfig` for a config.json without a fault.

    Args:
        raw: Content of the file.
        head_dim: Width of a query head.

    """
    parameters = raw.get("rope_parameters")
    rope: Mapping[str, Any] = parameters if isinstance(parameters, dict) else raw
    theta = rope.get("rope_theta")
    shape = {
        **{name: raw[name] for name in _REQUIRED},
        "num_key_value_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "rms_norm_eps": raw.get("rms_norm_eps") or 1e-6,
        "architecture": raw["model_type"],
        "head_dim": head_dim,
        # Some architectures have an angle for each kind of layer; only transformers computes them.
        "rope_theta": 10_000.0 if theta is None else theta,
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "mtp_num_heads": 0,
    }
    width = raw.get("intermediate_size")
    if not _routes(raw):
        return shape | {"num_experts": 0, "num_experts_per_tok": 0, "intermediate_size": width}
    counts = [raw[name] for name in _EXPERT_COUNTS if raw.get(name) is not None]
    return shape | {
        "num_experts": counts[0] if counts else None,
        "num_experts_per_tok": raw.get("num_experts_per_tok"),
        "moe_intermediate_size": raw.get("moe_intermediate_size") or width,
        "norm_topk_prob": raw.get("norm_topk_prob", True),
    }


def _routes(raw: Mapping[str, Any]) -> bool:
    """Whether a model has experts, whatever its architecture calls their number."""
    return any("expert" in name and type(value) is int and value for name, value in raw.items())


def foreign_config_json(text: str, **extra: Any) -> str:
    """Return the config.json of the published weights: in bfloat16 and without MTP layers.

    Args:
        text: The config.json of the folder from which the run started.
        extra: Additional keys that do not affect the logits, such as `eos_token_id`.

    """
    raw: dict[str, Any] = json.loads(text)
    raw |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    # Layers for multi-token prediction are not published.
    if "num_nextn_predict_layers" in raw:
        raw["num_nextn_predict_layers"] = 0
    return json.dumps(raw | extra, indent=2, sort_keys=True)
