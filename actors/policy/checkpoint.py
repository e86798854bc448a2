"""Checkpoints in the formats of the policy's families, published weights, and digests.

One table, `hf_views`, maps every tensor name of the format to a contiguous view of the model's
fused parameters. Saving, loading, publishing and in-flight updates all use it, so the flat indices
of a delta mean the same in `transformers`, in vLLM and here.

The multi-token-prediction head is not part of the format. Only mid-training uses it, and it is
neither published nor saved here.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from penstock.actors.policy.adapter import PREFIX as ADAPTER_PREFIX
from penstock.actors.policy.adapter import is_adapter, merge, tensor_name
from penstock.actors.policy.config import NumericsConfig, PolicyConfig
from penstock.actors.policy.hf.config import CONFIG_FILE, config_json, read_hf_config
from penstock.actors.policy.hf.weights import find_weights, write_weights
from penstock.actors.policy.layers import TransformerLayer
from penstock.actors.policy.model import Policy
from penstock.actors.policy.snapshot import E8M0, FP8_E4M3
from penstock.actors.runtime.files import write_atomic
from penstock.kernels.digest import root_digest

PUBLISHED_DTYPE = torch.bfloat16
"""Dtype of the weights that generators sample with; the trainer's master weights are float32."""
_BYTES = {torch.float8_e4m3fn: FP8_E4M3, torch.float8_e8m0fnu: E8M0}


def hf_views(policy: Policy) -> dict[str, torch.Tensor]:
    """Return a detached view of the parameters for every tensor name of the checkpoint format."""
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
    if policy.config.adapter is not None:
        parameters = policy.named_parameters()
        views |= {tensor_name(name): each for name, each in parameters if is_adapter(name)}
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
    }
    if attention.query_norm is not None and attention.key_norm is not None:
        views["self_attn.q_norm.weight"] = attention.query_norm
        views["self_attn.k_norm.weight"] = attention.key_norm
    if attention.qkv_bias is not None:
        for name, bias in zip("qkv", attention.qkv_bias.split(widths), strict=True):
            views[f"self_attn.{name}_proj.bias"] = bias
    if layer.router is not None:
        views["mlp.gate.weight"] = layer.router.weight
    for expert in range(experts.down.shape[0]):
        gate, up = experts.gate_up[expert].chunk(2)
        prefix = "mlp." if layer.router is None else f"mlp.experts.{expert}."
        views[prefix + "gate_proj.weight"] = gate
        views[prefix + "up_proj.weight"] = up
        views[prefix + "down_proj.weight"] = experts.down[expert]
    return views


@torch.no_grad()
def merged_policy(policy: Policy) -> Policy:
    """Return the policy with its adapters' products added to its matrices, and no adapters.

    One without adapters is returned itself; a copy shares what has none.
    """
    adapter = policy.config.adapter
    if adapter is None:
        return policy
    with torch.device("meta"):
        plain = Policy(msgspec.structs.replace(policy.config, adapter=None))
    own = {name: value.detach() for name, value in policy.named_parameters()}
    adapted = ("attention.qkv", "attention.output", "experts.gate_up", "experts.down")
    names = {name for name, _ in plain.named_parameters()}
    state = {name: own[name].clone() if name.endswith(adapted) else own[name] for name in names}
    plain.load_state_dict(state, assign=True)
    plain.cos, plain.sin = policy.cos, policy.sin
    merge(hf_views(policy) | hf_views(plain), adapter.scale)
    return plain.requires_grad_(False)


def publishable_state(policy: Policy) -> dict[str, torch.Tensor]:
    """Return copies of the policy's tensors, rounded to `PUBLISHED_DTYPE`, by checkpoint name."""
    return {
        # Always a copy: training continues while the version is published.
        name: view.to(PUBLISHED_DTYPE, copy=True).contiguous()
        for name, view in hf_views(policy).items()
    }


@torch.no_grad()
def load_published(policy: Policy, state: Mapping[str, torch.Tensor]) -> None:
    """Copy a full state into the policy's parameters, in place.

    Raises:
        ValueError: The names or shapes differ from the policy's.

    """
    views = hf_views(policy)
    check_state(views, state)
    for name, view in views.items():
        view.copy_(state[name])


def check_state(views: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Check that a state has the names and shapes of the views.

    Raises:
        ValueError: They differ; the text names the tensors.

    """
    if views.keys() != state.keys():
        missing, unknown = sorted(views.keys() - state.keys()), sorted(state.keys() - views.keys())
        raise ValueError(
            f"weights: expected the policy's tensors, missing {missing[:5]}, unknown {unknown[:5]}"
        )
    for name, view in views.items():
        if view.shape != state[name].shape:
            raise ValueError(
                f"tensor {name}: expected shape {tuple(view.shape)}, got {tuple(state[name].shape)}"
            )


def state_digest(state: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of named tensors, equal exactly if names, dtypes, shapes and bits are."""
    return root_digest({name: as_numpy(tensor) for name, tensor in state.items()})


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a numpy array; for dtypes that numpy lacks, see `Snapshot`.

    CPU tensors are not copied; tensors on a GPU are.
    """
    tensor = tensor.detach().cpu().contiguous()
    # Numpy has no bfloat16: return its bit patterns.
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype in _BYTES:
        return tensor.view(torch.uint8).numpy().view(_BYTES[tensor.dtype])
    return tensor.numpy()


def as_torch(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares memory with an array of `as_numpy`; bfloat16 or float32 only."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def save_checkpoint(policy: Policy, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and then the weights; each file is replaced atomically."""
    # The weights come last: a folder that has weights is complete.
    name = str(dtype).removeprefix("torch.")
    write_atomic(folder / CONFIG_FILE, config_json(policy.config, name).encode())
    write_weights(folder, {name: view.to(dtype) for name, view in hf_views(policy).items()})


def load_checkpoint(folder: Path, numerics: NumericsConfig | None = None) -> Policy:
    """Load a checkpoint folder into a float32 policy.

    Args:
        folder: Folder with config.json and safetensors files, as transformers writes it.
        numerics: Numerics of the policy; None uses the defaults.

    Raises:
        ModelFormatError: A file is missing or malformed, or tensors do not match the config.

    """
    config = read_hf_config(folder)
    config = msgspec.structs.replace(config, numerics=numerics or config.numerics)
    files = find_weights(folder, tensor_shapes(config))
    policy = Policy(config)
    files.read_into(hf_views(policy))
    return policy


def tensor_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a policy's tensors without allocating them.

    Those of its adapters are left out: a model's folder has none (`adapter_shapes`).
    """
    shapes = _all_shapes(config)
    return {name: shapes[name] for name in shapes if not name.startswith(ADAPTER_PREFIX)}


def adapter_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a policy's adapters without allocating them."""
    shapes = _all_shapes(config)
    return {name: shapes[name] for name in shapes if name.startswith(ADAPTER_PREFIX)}


def _all_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        policy = Policy(config)
    return {name: tuple(view.shape) for name, view in hf_views(policy).items()}
