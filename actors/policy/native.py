"""Converts a policy to the packed weights and dimensions that the compiled step takes."""

import numpy as np
import torch

from penstock.actors.policy.checkpoint import merged_policy
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.experts import round_to
from penstock.actors.policy.layers import TransformerLayer
from penstock.actors.policy.model import Policy
from penstock.kernels.decode.layout import DecodeShape, DecodeWeights, LayerWeights, pack


def has_wide_routes(config: PolicyConfig) -> bool:
    """Return whether expert ids need more than one byte."""
    return config.num_experts > 256


def decode_shape(config: PolicyConfig, num_rows: int, num_positions: int) -> DecodeShape:
    """Return the dimensions of a policy with a KV cache of [rows, positions]."""
    return DecodeShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        # A dense model is one expert that every token uses.
        experts=max(config.num_experts, 1),
        chosen=max(config.num_experts_per_tok, 1),
        width=config.ffn_width,
        vocab=config.vocab_size,
        rows=num_rows,
        positions=num_positions,
        normalize=config.norm_topk_prob,
        wide_routes=has_wide_routes(config),
        mxfp8=config.numerics.expert_format == "mxfp8",
        eps=config.rms_norm_eps,
    )


def pack_policy(policy: Policy) -> DecodeWeights:
    """Return a copy of a policy's weights in the kernel's layout, with adapters merged."""
    policy = merged_policy(policy)
    head = policy.embedding if policy.config.tie_word_embeddings else policy.head
    return DecodeWeights(
        layers=[
            _pack_layer(layer) for layer in policy.layers if isinstance(layer, TransformerLayer)
        ],
        embedding=_numpy(policy.embedding),
        head=pack(_numpy(head)),
        final_norm=_numpy(policy.final_norm),
        rotary=(_numpy(policy.cos), _numpy(policy.sin)),
    )


def _pack_layer(layer: TransformerLayer) -> LayerWeights:
    attention = layer.attention
    return LayerWeights(
        attention_norm=_numpy(layer.attention_norm),
        qkv=pack(_numpy(attention.qkv)),
        output=pack(_numpy(attention.output)),
        qkv_bias=_numpy_or_none(attention.qkv_bias),
        query_norm=_numpy_or_none(attention.query_norm),
        key_norm=_numpy_or_none(attention.key_norm),
        expert_norm=_numpy(layer.expert_norm),
        gate=None if layer.router is None else pack(_numpy(layer.router.weight)),
        gate_up=pack(_rounded(layer.experts.gate_up, layer.experts.expert_format)),
        down=pack(_rounded(layer.experts.down, layer.experts.expert_format)),
    )


def _rounded(weights: torch.Tensor, expert_format: str) -> np.ndarray:
    return _numpy(round_to(weights.detach(), expert_format))


def _numpy_or_none(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else _numpy(tensor)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy as a numpy array; FSDP could not free memory that numpy shares."""
    return tensor.detach().clone().numpy()
