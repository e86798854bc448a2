"""Reader and writer of the settings in a PEFT folder: what its adapters compute.

Only plain LoRA is read, the same in every layer; any other setting is refused by name, because an
adapter that is computed otherwise than it was trained is a silent error. Must not import torch.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.hf.config import ModelFormatError, read_json

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BYTES_MAX = 1 << 20
_READ = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    # Others, such as PiSSA, change the base.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
        *("lora_dropout", "loftq_config", "qalora_group_size", "megatron_core", "layers_pattern"),
        *("exclude_modules", "ensure_weight_tying"),
    }
)
"""Keys that do not change what trained adapters compute, or only together with another key."""


def adapter_json(config: AdapterConfig, base: str) -> str:
    """Return the text of an adapter_config.json.

    Args:
        config: Of the adapters.
        base: Path or name of the model that they belong to.

    """
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(config.targets),
    }
    return json.dumps(settings, indent=2)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the settings of a PEFT folder's adapters.

    Raises:
        ModelFormatError: They are not plain LoRA; the error names file, key and value.

    """
    path = folder / PEFT_CONFIG
    values = read_json(path, _BYTES_MAX)
    for name in ("peft_type", *_READ):
        if name not in values:
            raise ModelFormatError(f"{path}: {name} is missing")
    for name, value in values.items():
        # Further variants of LoRA are keys that are null, false or empty where they are not used.
        is_plain = value in _PLAIN[name] if name in _PLAIN else not value
        if name not in _READ and name not in _WITHOUT_EFFECT and not is_plain:
            expected = " or ".join(map(repr, _PLAIN.get(name, (None,))))
            text = f"expected {expected}, as in plain LoRA, got {value!r:.100}"
            raise ModelFormatError(f"{path}: {name}: {text}")
    table = {ours: values[theirs] for theirs, ours in _READ.items()}
    try:
        config = msgspec.convert(table, AdapterConfig)
    except ValueError as error:
        raise ModelFormatError(
            f"{path}: expected valid r, lora_alpha and target_modules: {error}"
        ) from error
    return msgspec.structs.replace(config, targets=tuple(sorted(config.targets)))
