"""Checkpoints in Qwen3-MoE's format, published weights, and digests.

One table, `hf_views`, names every tensor of the format as a contiguous view of the model's own
(fused) parameters; saving, loading, publishing and in-flight updates all go through it, so flat
indices of a delta mean the same in `transformers`, in vLLM and here.

The multi-token-prediction head is not part of the format: it lies beside it in `mtp.safetensors`,
a file that `transformers` does not read, and is never published to generators.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.layers import TransformerLayer
from penstock.actors.policy.model import Policy
from penstock.actors.policy.snapshot import E8M0, FP8_E4M3
from penstock.actors.runtime.files import write_atomic
from penstock.kernels.digest import root_digest

PUBLISHED_DTYPE = torch.bfloat16
"""The format of the weights that generators sample with; the trainer's masters are float32."""
_BYTES = {torch.float8_e4m3fn: FP8_E4M3, torch.float8_e8m0fnu: E8M0}

_FIXED_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "sliding_window": None,
    "use_cache": True,
    "use_sliding_window": False,
}


def hf_views(policy: Policy) -> dict[str, torch.Tensor]:
    """Name every tensor of the checkpoint format as a detached view of the policy's parameters."""
    views = {
        "model.embed_tokens.weight": policy.embedding,
        "model.norm.weight": policy.final_norm,
    }
    if not policy.config.tie_word_embeddings:
        views["lm_head.weight"] = policy.head
    for index, layer in enumerate(policy.layers):
        assert isinstance(layer, TransformerLayer)
        prefix = f"model.layers.{index}."
        views |= {prefix + name: view for name, view in _layer_views(layer, policy.config).items()}
    return {name: view.detach() for name, view in views.items()}


def _layer_views(layer: TransformerLayer, config: PolicyConfig) -> dict[str, torch.Tensor]:
    attention, experts = layer.attention, layer.experts
    widths = (config.query_dim, config.key_value_dim, config.key_value_dim)
    query, key, value = attention.qkv.split(widths)
    views = {
        "input_layernorm.weight": layer.attention_norm,
        "post_attention_layernorm.weight": layer.expert_norm,
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": attention.output,
        "self_attn.q_norm.weight": attention.query_norm,
        "self_attn.k_norm.weight": attention.key_norm,
        "mlp.gate.weight": layer.router.weight,
    }
    for expert in range(config.num_experts):
        gate, up = experts.gate_up[expert].chunk(2)
        prefix = f"mlp.experts.{expert}."
        views[prefix + "gate_proj.weight"] = gate
        views[prefix + "up_proj.weight"] = up
        views[prefix + "down_proj.weight"] = experts.down[expert]
    return views


def publishable_state(policy: Policy) -> dict[str, torch.Tensor]:
    """Copy the policy's tensors, rounded to `PUBLISHED_DTYPE`, under the format's names."""
    return {
        name: view.to(PUBLISHED_DTYPE, copy=True).contiguous()
        for name, view in hf_views(policy).items()
    }


@torch.no_grad()
def load_published(policy: Policy, state: Mapping[str, torch.Tensor]) -> None:
    """Copy a full state into the policy's parameters, in place.

    Raises:
        ValueError: names or shapes that are not exactly the policy's.

    """
    views = hf_views(policy)
    check_state(views, state)
    for name, view in views.items():
        view.copy_(state[name])


def check_state(views: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Refuse a state whose names or shapes differ from the views'.

    Raises:
        ValueError: naming the tensors.

    """
    if views.keys() != state.keys():
        missing, unknown = sorted(views.keys() - state.keys()), sorted(state.keys() - views.keys())
        raise ValueError(f"weights do not fit: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, view in views.items():
        if view.shape != state[name].shape:
            raise ValueError(
                f"tensor {name} must have shape {tuple(view.shape)}, not {tuple(state[name].shape)}"
            )


def state_digest(state: Mapping[str, torch.Tensor]) -> str:
    """Digest named tensors: equal digests mean equal names, dtypes, shapes and bits."""
    return root_digest({name: as_numpy(tensor) for name, tensor in state.items()})


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """View a CPU tensor as numpy without copying; as `Snapshot` says where numpy has no dtype."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype in _BYTES:
        return tensor.view(torch.uint8).numpy().view(_BYTES[tensor.dtype])
    return tensor.numpy()


def save_checkpoint(policy: Policy, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, model.safetensors and, if there is a head, mtp.safetensors.

    Each file is replaced atomically; the weights are written last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.json", config_json(policy.config, dtype).encode())
    if policy.config.mtp_num_heads:
        head = {f"mtp.{name}": p.detach() for name, p in policy.mtp.named_parameters()}
        write_atomic(folder / "mtp.safetensors", save(head))
    state = {name: view.to(dtype).contiguous() for name, view in hf_views(policy).items()}
    write_atomic(folder / "model.safetensors", save(state, {"format": "pt"}))


def config_json(config: PolicyConfig, dtype: torch.dtype = PUBLISHED_DTYPE) -> str:
    """Return the text of the format's `config.json`."""
    values = msgspec.to_builtins(config) | _FIXED_CONFIG
    del values["numerics"]
    values["dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(values, indent=2)


def load_checkpoint(folder: Path) -> Policy:
    """Read a checkpoint of the format back into a float32 policy.

    Raises:
        ValueError: a file that is not of the format, or whose tensors do not fit the config.
        FileNotFoundError: a file that is missing.

    """
    policy = Policy(load_config(folder))
    load_published(policy, _load_tensors(folder / "model.safetensors"))
    if policy.config.mtp_num_heads:
        head = _load_tensors(folder / "mtp.safetensors")
        parameters = {f"mtp.{name}": p.detach() for name, p in policy.mtp.named_parameters()}
        check_state(parameters, head)
        for name, parameter in parameters.items():
            parameter.copy_(head[name])
    return policy


def load_config(folder: Path) -> PolicyConfig:
    """Read `config.json` of a Qwen3-MoE checkpoint; keys that fix nothing here are passed over.

    Raises:
        ValueError: not JSON, or an architecture other than Qwen3-MoE's.

    """
    path = folder / "config.json"
    raw = json.loads(path.read_bytes())
    if raw.get("model_type") != "qwen3_moe":
        raise ValueError(f"{path}: model_type must be qwen3_moe, not {raw.get('model_type')!r}")
    fields = PolicyConfig.__struct_fields__
    known = {name: value for name, value in raw.items() if name in fields}
    known["mtp_num_heads"] = raw.get("mtp_num_heads", 0)
    return msgspec.convert(known, PolicyConfig)


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from error
