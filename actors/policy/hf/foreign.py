"""Shapes of models that transformers computes on ranks, and the own policy does not.

Such a model is trained with `[trainer.ranks] model = "transformers"` and sampled by vLLM. Both read
the folder's own `config.json`, as do users of an export. What the rest of a run has to
know of it is a `PolicyConfig` that names the architecture.
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
"""Keys that are fields of `PolicyConfig`."""
REQUIRED = (*_SAME, _NUM_EXPERTS)
FOREIGN_TYPES = ("deepseek_v3", "glm4_moe")
"""Values of `model_type`. Their routers, in `actors/trainer/ranks/hf/routing.py`."""


def foreign_shape(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the fields of `PolicyConfig` for a config.json that has the keys of `REQUIRED`.

    Args:
        raw: the file.
        head_dim: width of a query head.

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
    """Return the config.json of what is published of such a model: bfloat16, without MTP layers.

    Args:
        text: config.json of the folder that the run started from.
        extra: keys without effect on the logits, such as `eos_token_id`.

    """
    raw: dict[str, Any] = json.loads(text)
    raw |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    if "num_nextn_predict_layers" in raw:
        raw["num_nextn_predict_layers"] = 0
    return json.dumps(raw | extra, indent=2, sort_keys=True)
