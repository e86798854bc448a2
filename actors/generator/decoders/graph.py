"""One step of inference on a GPU: recorded once for each size as a CUDA graph, then replayed.

A step of a small model is hundreds of kernels of some microseconds, and to start one takes longer
than it runs; a graph is one start. So nothing in it may depend on values that the host would have
to wait for: every expert computes every token, and what a token's own experts gave is picked out.

Tokens are all alike, whether decoded or prefilled: each writes its place of its row of the cache,
and looks at that row up to itself. They are filled up to a power of two; what fills up has the
cache's last row, which no request has.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from penstock.actors.generator.decoders.packed import Decoder, StepBatch
from penstock.actors.generator.kv_cache import SlotCache
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.experts import round_to
from penstock.actors.policy.layers import RoutedTokens, TransformerLayer
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import combine, rms_norm

_TOKENS_MIN, _SPAN_MIN = 8, 128
_PAIRS_MAX = 1 << 18
"""Tokens of a graph times cached positions that each looks at: what attention copies."""


class _Recorded(NamedTuple):
    """A graph, and where it reads and writes. Shapes: N tokens, V of the vocabulary."""

    graph: torch.cuda.CUDAGraph
    host: torch.Tensor
    """[4, N] int64, pinned: token ids, rows, positions, and whose logits are wanted."""
    inputs: torch.Tensor
    """The same on the device."""
    logits: torch.Tensor
    """[N, V]."""
    routes: torch.Tensor
    """[N, L, K]."""


class GraphDecoder:
    """Runs steps of a policy over a slot cache on a GPU; logits come to the host."""

    name = "cuda"
    """Of the step in `EngineCapabilities.arithmetic`."""
    prepare = staticmethod(Decoder.prepare)
    sample = staticmethod(Decoder.sample)

    def __init__(self, config: PolicyConfig, cache: SlotCache) -> None:
        self._config, self._cache = config, cache
        device = cache.kv.device
        self._columns = torch.arange(cache.num_tokens_max, device=device)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakKeyDictionary[Policy, dict[tuple[int, int], _Recorded]]
        self._graphs = WeakKeyDictionary()

    @torch.inference_mode()
    def step(self, policy: Policy, batch: StepBatch) -> torch.Tensor:
        """Extend the cache by the batch's tokens; see `Decoder.step`.

        Tokens come in the order of their positions, so a step may be cut anywhere.
        """
        rows, positions = batch.places()
        span = min(_rounded_up(max(positions) + 1, _SPAN_MIN), self._cache.num_tokens_max)
        most, parts = max(_TOKENS_MIN, _PAIRS_MAX // span), []
        for start in range(0, len(rows), most):
            part = slice(start, min(start + most, len(rows)))
            wanted = [i - start for i in batch.output_rows if start <= i < part.stop]
            values = (batch.token_ids[part], rows[part], positions[part], wanted)
            recorded = self._recorded(policy, _rounded_up(len(values[0]), _TOKENS_MIN), span)
            self._fill(recorded, values)
            recorded.graph.replay()
            parts.append(recorded.logits[: len(wanted)].cpu())
            at = (rows[part], positions[part])
            self._cache.routes[at] = recorded.routes[: len(values[0])].cpu()
        return torch.cat(parts)

    def _fill(self, recorded: _Recorded, values: tuple[list[int], ...]) -> None:
        recorded.host.zero_()
        recorded.host[1] = self._cache.kv.shape[1] - 1
        for line, part in zip(recorded.host, values, strict=True):
            line[: len(part)] = torch.tensor(part, dtype=torch.int64)
        recorded.inputs.copy_(recorded.host, non_blocking=True)

    def _recorded(self, policy: Policy, num_tokens: int, span: int) -> _Recorded:
        graphs = self._graphs.setdefault(policy, {})
        if (num_tokens, span) not in graphs:
            graphs[num_tokens, span] = self._record(policy, num_tokens, span)
        return graphs[num_tokens, span]

    def _record(self, policy: Policy, num_tokens: int, span: int) -> _Recorded:
        host = torch.zeros(4, num_tokens, dtype=torch.int64, pin_memory=True)
        host[1] = self._cache.kv.shape[1] - 1
        inputs = host.to(self._cache.kv.device)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._compute(policy, inputs, span)  # Loads what is loaded at its first use.
            # Other threads write the weights of the next version meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                logits, routes = self._compute(policy, inputs, span)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return _Recorded(graph, host, inputs, logits, routes)

    def _compute(
        self, policy: Policy, inputs: torch.Tensor, span: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, rows, positions, wanted = inputs.unbind()
        cos, sin = (table[positions].unsqueeze(1) for table in (policy.cos, policy.sin))
        is_hidden = self._columns[:span] > positions.unsqueeze(1)
        mask = torch.zeros(is_hidden.shape, device=inputs.device)
        mask = mask.masked_fill_(is_hidden, -torch.inf)[:, None, None]
        x, routes = F.embedding(token_ids, policy.embedding), []
        for kv, layer in zip(self._cache.kv, policy.layers, strict=True):
            assert isinstance(layer, TransformerLayer)
            attention, normed = layer.attention, rms_norm(x, layer.attention_norm, layer.eps)
            query, key, value = attention.project(normed, cos, sin)
            kv[rows, :, positions] = torch.cat((key, value), dim=1)
            keys, values = kv[:, :, :span].index_select(0, rows).chunk(2, dim=1)
            grouped = query.unflatten(1, (keys.shape[1], -1))
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            x = x + F.linear(out.flatten(1), attention.output)
            normed = rms_norm(x, layer.expert_norm, layer.eps)
            routing = layer.route(normed)
            x = x + _experts(layer, normed, routing)
            routes.append(routing.recorded)
        hidden = rms_norm(x[wanted], policy.final_norm, self._config.rms_norm_eps)
        recorded = torch.stack(routes, dim=1).to(self._cache.routes.dtype)
        return policy.logits(hidden), recorded


def _experts(layer: TransformerLayer, x: torch.Tensor, routing: RoutedTokens) -> torch.Tensor:
    """Return what the chosen experts of [N, d] give together."""
    experts = layer.experts
    rounded = round_to(x, experts.expert_format)
    gate, up = (rounded @ experts.gate_up.transpose(1, 2)).chunk(2, dim=-1)
    activation = round_to(F.silu(gate) * up, experts.expert_format)
    outputs = activation @ experts.down.transpose(1, 2)
    tokens = torch.arange(len(x), device=x.device).unsqueeze(1)
    return combine(outputs[routing.experts, tokens], routing.weights)


def _rounded_up(count: int, least: int) -> int:
    """Return the next power of two, at least `least`."""
    return max(least, 1 << (count - 1).bit_length())
