"""Configurations of models that only transformers and vLLM can compute.

Such a model is trained with `[trainer.ranks] model = "transformers"` and sampled with vLLM. Both
read the folder's own `config.json`, as do users of an export. The rest of a run only needs a
`PolicyConfig` that names the architecture.
"""

import json
from collections.abc import Mapping
from typing import Any

_NUM_EXPERTS = "n_routed_experts"
_SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
)
"""Keys with the same name as a field of `PolicyConfig`."""
REQUIRED = (*_SAME, _NUM_EXPERTS)
"""Keys that a config.json must have."""
FOREIGN_TYPES = ("deepseek_v3", "glm4_moe")
"""Supported values of `model_type`; `actors/trainer/ranks/hf/routing.py` has their routers."""


def foreign_shape(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the fields of `PolicyConfig` for a config.json that has the `REQUIRED` keys.

    Args:
        raw: Content of the file.
        head_dim: Width of a query head.

    """
    parameters = raw.get("rope_parameters")
    rope: Mapping[str, Any] = parameters if isinstance(parameters, dict) else raw
    return {
        **{name: raw[name] for name in _SAME},
        "architecture": raw["model_type"],
        "num_experts": raw[_NUM_EXPERTS],
        "head_dim": head_dim,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "mtp_num_heads": 0,
    }


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
