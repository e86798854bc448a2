"""The inference step in plain torch: decoding rows and prefill chunks in one packed forward pass.

Reads the parameters and the expert kernel of the policy itself, so replacing the policy object is a
complete weight update, and the arithmetic equals the trainer's.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from penstock.actors.generator.kv_cache import SlotCache
from penstock.actors.generator.sampler import SamplingBatch, sample
from penstock.actors.policy.checkpoint import merged_policy
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.experts import round_to, run_experts, sort_by_expert
from penstock.actors.policy.layers import TransformerLayer
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import combine, rms_norm

_SPAN_STEP = 32
"""Granularity of decoding attention: it reads a multiple of this many positions."""


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive prompt tokens of one row."""

    row: int
    start: int
    num_tokens: int


@dataclass(frozen=True)
class StepBatch:
    """N tokens of one step: first those of each row 0 .. B-1, then the prefill chunks."""

    token_ids: list[int]
    """Ids of the N tokens."""
    decode_positions: list[int]
    """Position of the first token of each of the B decoding rows."""
    chunks: list[PrefillChunk]
    output_rows: list[int]
    """Indices into `token_ids` of the tokens whose logits the step returns."""
    draft_lengths: Sequence[int] = ()
    """Number of further tokens of each of the B rows, at the positions after its first one; empty
    for none at all. Only the native step takes some."""

    def places(self) -> tuple[list[int], list[int]]:
        """Return the cache row and the position of each token."""
        rows = list(range(len(self.decode_positions)))
        positions = list(self.decode_positions)
        if self.draft_lengths:
            spans = list(zip(rows, positions, self.draft_lengths, strict=True))
            rows = [row for row, _, count in spans for _ in range(count + 1)]
            positions = [first + i for _, first, count in spans for i in range(count + 1)]
        for chunk in self.chunks:
            rows += [chunk.row] * chunk.num_tokens
            positions += range(chunk.start, chunk.start + chunk.num_tokens)
        return rows, positions


@dataclass(frozen=True)
class _Places:
    """Rows, positions and attention masks of a batch, as tensors."""

    rows: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    span: int
    decode_mask: torch.Tensor
    """Additive mask of the decoding rows, 0 or -inf: [B, 1, 1, span]."""
    chunk_masks: list[torch.Tensor]
    """Additive mask of each chunk, 0 or -inf: [n, start + n]."""


class Decoder:
    """Runs steps of a policy over a KV cache on a CPU without compiled code."""

    name = "torch"
    """Name of this step in `EngineCapabilities.arithmetic`."""

    def __init__(self, config: PolicyConfig, cache: SlotCache) -> None:
        self.config = config
        self.cache = cache
        self._columns = torch.arange(cache.num_tokens_max)

    @staticmethod
    def prepare(policy: Policy) -> Policy:
        """Return the policy that `step` takes: the given one, or a copy.

        Of a copy, experts are rounded or adapters merged.
        """
        policy = merged_policy(policy)
        expert_format = policy.config.numerics.expert_format
        if expert_format == "bf16":
            return policy
        # Rounded once per version instead of in every step.
        rounded = copy.deepcopy(policy)
        for layer in rounded.layers:
            assert isinstance(layer, TransformerLayer)
            for weights in (layer.experts.gate_up, layer.experts.down):
                weights.detach().copy_(round_to(weights.detach(), expert_format))
        return rounded

    @staticmethod
    def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[list[int], list[float]]:
        """See `sampler.sample`."""
        return sample(logits, batch)

    def step(self, policy: Policy, batch: StepBatch) -> torch.Tensor:
        """Append the tokens of the batch to the cache.

        Returns:
            Logits of the output tokens, float32 [len(output_rows), V].

        """
        places = self._places(policy, batch)
        x = F.embedding(torch.tensor(batch.token_ids), policy.embedding)
        routes = []
        for index, layer in enumerate(policy.layers):
            assert isinstance(layer, TransformerLayer)
            normed = rms_norm(x, layer.attention_norm, layer.eps)
            x = x + self._attention(index, layer, normed, batch, places)
            normed = rms_norm(x, layer.expert_norm, layer.eps)
            routing, experts = layer.route(normed), layer.experts
            dispatch = sort_by_expert(routing.experts, experts.down.shape[0])
            expert_format = experts.expert_format
            rounded = round_to(normed, expert_format)
            outputs = run_experts(rounded, dispatch, experts.gate_up, experts.down, expert_format)
            per_slot = outputs[3]
            x = x + combine(per_slot, routing.weights)
            routes.append(routing.recorded)
        recorded = torch.stack(routes, dim=1).to(self.cache.routes.dtype)
        self.cache.routes[batch.places()] = recorded
        # The output head is the largest product: skip tokens whose logits nobody needs.
        if len(batch.output_rows) < x.shape[0]:
            x = x[batch.output_rows]
        hidden = rms_norm(x, policy.final_norm, self.config.rms_norm_eps)
        return policy.logits(hidden)

    def _places(self, policy: Policy, batch: StepBatch) -> _Places:
        rows, positions = batch.places()
        masks = []
        for chunk in batch.chunks:
            end = chunk.start + chunk.num_tokens
            last_visible = self._columns[chunk.start : end].unsqueeze(1)
            masks.append(_additive(self._columns[:end] > last_visible))
        at = torch.tensor(positions)
        num_decode = len(batch.decode_positions)
        longest = max(batch.decode_positions, default=0) + 1
        span = min(-(-longest // _SPAN_STEP) * _SPAN_STEP, self.cache.num_tokens_max)
        hidden = self._columns[:span] > at[:num_decode].unsqueeze(1)
        return _Places(
            rows=torch.tensor(rows),
            positions=at,
            cos=policy.cos[at].unsqueeze(1),
            sin=policy.sin[at].unsqueeze(1),
            span=span,
            decode_mask=_additive(hidden)[:, None, None],
            chunk_masks=masks,
        )

    def _attention(
        self,
        index: int,
        layer: TransformerLayer,
        x: torch.Tensor,
        batch: StepBatch,
        places: _Places,
    ) -> torch.Tensor:
        config, kv = self.config, self.cache.kv[index]
        query, key, value = layer.attention.project(x, places.cos, places.sin)
        # Written before it is read: a token attends to itself and to its chunk's earlier tokens.
        kv[places.rows, :, places.positions] = torch.cat((key, value), dim=1)
        attended = x.new_empty(x.shape[0], config.query_dim)
        num_decode = len(batch.decode_positions)
        if num_decode:
            grouped = query[:num_decode].unflatten(1, (config.num_key_value_heads, -1))
            keys, values = self._split(kv[:num_decode, :, : places.span])
            out = F.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=places.decode_mask
            )
            attended[:num_decode] = out.flatten(1)
        start = num_decode
        for chunk, mask in zip(batch.chunks, places.chunk_masks, strict=True):
            end = start + chunk.num_tokens
            keys, values = self._split(kv[chunk.row, None, :, : chunk.start + chunk.num_tokens])
            heads_first = query[start:end].transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(
                heads_first, keys, values, attn_mask=mask, enable_gqa=True
            )
            attended[start:end] = out[0].transpose(0, 1).flatten(1)
            start = end
        return F.linear(attended, layer.attention.output)

    def _split(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split [B, 2*Hkv, T, D] into keys and values, each [B, Hkv, T, D]."""
        heads = self.config.num_key_value_heads
        return kv[:, :heads], kv[:, heads:]


def _additive(is_hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)
