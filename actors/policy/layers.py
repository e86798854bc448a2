"""The transformer's layers and router, which work on packed tokens.

Projections that share an input are stored as one matrix, laid out so that every tensor of the
checkpoint format is a contiguous view of it (see `checkpoint.py`).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from penstock.actors.policy.adapter import adapters_of
from penstock.actors.policy.config import PolicyConfig, RopeScaling
from penstock.actors.policy.experts import ExpertMlp, StraightThrough
from penstock.actors.policy.operations import choose_experts, rms_norm


class RoutedTokens(NamedTuple):
    """Routes of T tokens: K of E experts each; K and E are 0 in a dense model."""

    experts: torch.Tensor
    """Experts to compute, int64 [T, K]; zeros [T, 1] in a dense model."""
    weights: torch.Tensor
    """Weights of `experts`, of the same shape."""
    recorded: torch.Tensor
    """Routes to record, int64 [T, K]."""
    scores: torch.Tensor
    """Router probabilities, [T, E]."""
    flips: torch.Tensor
    """Number of replayed ids that the router itself would not have chosen, int64 scalar."""


class Router(nn.Module):
    """Router that chooses experts, or replays the choice of another forward pass."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.plausible = config.numerics.plausible
        # bfloat16 is what a plain trainer uses, which mode `off` reproduces.
        self.dtype = torch.float32 if config.numerics.has_exact_gate else torch.bfloat16
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: torch.Tensor, recorded: torch.Tensor | None) -> RoutedTokens:
        """Route tokens to experts.

        Args:
            x: Inputs of the router, [T, d].
            recorded: Expert ids [T, K] to use instead of the router's choice, in slot order; rows
                that start with `ROUTE_FREE` are routed freely. Weights always come from the scores
                of this pass, so gradients reach the router.

        """
        logits = F.linear(x.to(self.dtype), self.weight.to(self.dtype)).float()
        chosen = choose_experts(
            logits,
            self.num_chosen,
            normalize=self.normalize,
            recorded=recorded,
            plausible=self.plausible,
        )
        return RoutedTokens(chosen.ids, chosen.weights, chosen.ids, chosen.scores, chosen.flips)


@dataclass(frozen=True)
class Segments:
    """Layout of the pieces in a packed batch of T tokens."""

    lengths: tuple[int, ...]
    """Number of tokens of each piece, in order; they sum to T."""
    ancestors: tuple[tuple[int, ...], ...]
    """Earlier pieces that each piece continues, first to last; empty if it starts a sequence."""
    masks: tuple[torch.Tensor | None, ...]
    """Additive attention mask of each piece, [n, seen + n], 0 or -inf; None if it is causal."""
    cos: torch.Tensor
    """Rotary cosines of each token's position in its own sequence, [T, 1, D/2]."""
    sin: torch.Tensor
    """Rotary sines of each token's position in its own sequence, [T, 1, D/2]."""

    @property
    def is_uniform(self) -> bool:
        """Whether all pieces are whole sequences of one length."""
        return len(set(self.lengths)) == 1 and not any(self.ancestors)


def causal_mask(num_new: int, num_seen: int) -> torch.Tensor | None:
    """Return an additive mask [new, seen + new], 0 or -inf; None if no tokens were seen before."""
    if num_seen == 0:
        return None
    mask = torch.full((num_new, num_seen + num_new), -torch.inf)
    return mask.triu_(num_seen + 1)


def rotary_table(config: PolicyConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotary tables (cos, sin), each float32 [max_position_embeddings, D/2]."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _scaled(1.0 / (config.rope_theta**half), config.rope_scaling)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale rotary frequencies as Llama 3.1 does (transformers' rope type `llama3`)."""
    if scaling.factor == 1.0:
        return frequencies
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 for slow frequencies, 1 for fast ones, and linear in between.
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding (half-split pairs) to [T, H, D] with tables [T, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query causal attention."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.query_dim + 2 * config.key_value_dim
        self.qkv = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.output = nn.Parameter(torch.empty(config.hidden_size, config.query_dim))
        has_norm = config.has_qk_norm
        self.query_norm = nn.Parameter(torch.ones(config.head_dim)) if has_norm else None
        self.key_norm = nn.Parameter(torch.ones(config.head_dim)) if has_norm else None
        self.qkv_bias = nn.Parameter(torch.zeros(rows)) if config.has_qkv_bias else None
        widths = {"q_proj": config.query_dim, "k_proj": config.key_value_dim}
        shapes = {
            name: (width, config.hidden_size)
            for name, width in (widths | {"v_proj": config.key_value_dim}).items()
        }
        shapes["o_proj"] = (config.hidden_size, config.query_dim)
        self.adapters = adapters_of(config.adapter, shapes)

    def forward(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Attend, [T, d] -> [T, d]; a token sees its own sequence up to itself."""
        query, key, value = self.project(x, segments.cos, segments.sin)
        attended = _attend(query, key, value, segments).flatten(1)
        projected = F.linear(attended, self.output)
        return adapted(self.adapters, "o_proj", attended, projected)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project [T, d] to rotated query [T, Hq, D], rotated key and value [T, Hkv, D]."""
        config = self.config
        flat = F.linear(x, self.qkv, self.qkv_bias)
        if self.adapters:
            widths = (config.query_dim, config.key_value_dim, config.key_value_dim)
            parts = zip(("q_proj", "k_proj", "v_proj"), flat.split(widths, 1), strict=True)
            flat = torch.cat([adapted(self.adapters, name, x, part) for name, part in parts], 1)
        heads = flat.view(x.shape[0], -1, config.head_dim)
        query, key, value = heads.split(
            (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads), 1
        )
        if self.query_norm is not None and self.key_norm is not None:
            query = rms_norm(query, self.query_norm, config.rms_norm_eps)
            key = rms_norm(key, self.key_norm, config.rms_norm_eps)
        return rotate(query, cos, sin), rotate(key, cos, sin), value


def adapted(
    adapters: nn.ModuleDict, name: str, x: torch.Tensor, projected: torch.Tensor
) -> torch.Tensor:
    """Return a matrix's product with [T, n], [T, m], and what its adapter adds if it has one."""
    return projected + adapters[name](x) if name in adapters else projected


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """Attend causally along each sequence: [T, Hq, D], [T, Hkv, D] x 2 -> [T, Hq, D]."""
    # Sequences of equal length form a batch, which takes one call.
    if segments.is_uniform:
        rows = (len(segments.lengths), -1)
        query, key, value = (t.unflatten(0, rows).transpose(1, 2) for t in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(0, 1)
    # `split`, not slices: its backward pass is one concatenation for any number of pieces.
    queries, keys, values = (
        t.transpose(0, 1).unsqueeze(0).split(segments.lengths, dim=2) for t in (query, key, value)
    )
    parts = []
    for piece, (before, mask) in enumerate(zip(segments.ancestors, segments.masks, strict=True)):
        seen = (*before, piece)
        attended = F.scaled_dot_product_attention(
            queries[piece],
            torch.cat([keys[i] for i in seen], dim=2),
            torch.cat([values[i] for i in seen], dim=2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        parts.append(attended)
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


class Experts(nn.Module):
    """Stacked weights of the experts; a dense layer is a single expert used by every token."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        count, width, hidden = max(config.num_experts, 1), config.ffn_width, config.hidden_size
        self.expert_format = config.numerics.expert_format
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
        shapes["down_proj"] = (hidden, width)
        self.adapters = adapters_of(config.adapter if config.is_dense else None, shapes)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the weighted sum of the chosen experts, [T, d] -> [T, d]."""
        if self.adapters:
            return self._dense(x)
        if self.expert_format == "bf16":
            return ExpertMlp.apply(x, ids, weights.to(x.dtype), self.gate_up, self.down)
        operands = (
            StraightThrough.apply(operand, self.expert_format)
            for operand in (x, self.gate_up, self.down)
        )
        x, gate_up, down = operands
        return ExpertMlp.apply(x, ids, weights.to(x.dtype), gate_up, down, self.expert_format)

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a dense layer and its adapters, [T, d] -> [T, d]."""
        gate, up = F.linear(x, self.gate_up[0]).chunk(2, dim=1)
        gate = adapted(self.adapters, "gate_proj", x, gate)
        inner = F.silu(gate) * adapted(self.adapters, "up_proj", x, up)
        return adapted(self.adapters, "down_proj", inner, F.linear(inner, self.down[0]))


class TransformerLayer(nn.Module):
    """One transformer block: attention, then experts, each with a pre-norm and a residual.

    In a dense model it has no router and one expert with weight 1.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.attention_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.attention = Attention(config)
        self.expert_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.router = None if config.is_dense else Router(config)
        self.experts = Experts(config)

    def forward(
        self, x: torch.Tensor, segments: Segments, recorded: torch.Tensor | None
    ) -> tuple[torch.Tensor, RoutedTokens]:
        """Compute the block, [T, d] -> [T, d], and return the routes as well."""
        normed = rms_norm(x, self.attention_norm, self.eps)
        x = x + self.attention(normed, segments)
        normed = rms_norm(x, self.expert_norm, self.eps)
        routing = self.route(normed, recorded)
        return x + self.experts(normed, routing.experts, routing.weights), routing

    def route(self, x: torch.Tensor, recorded: torch.Tensor | None = None) -> RoutedTokens:
        """Route [T, d]; without a router, all tokens use the one expert and nothing is recorded."""
        if self.router is not None:
            return self.router(x, recorded)
        only = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
        nothing = only.new_empty(x.shape[0], 0)
        weights, scores = x.new_ones(only.shape), x.new_empty(nothing.shape)
        return RoutedTokens(only, weights, nothing, scores, only.new_zeros(()))
