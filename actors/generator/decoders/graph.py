"""The inference step on a GPU, recorded once per size as a CUDA graph and then replayed.

A step of a small model launches hundreds of kernels that each run for a few microseconds, less than
a launch takes; a graph needs one launch. Nothing in a graph may depend on values that the host
would have to wait for. So every expert computes every token, and the outputs of a token's own
experts are selected afterwards.

Decoded and prefilled tokens are treated alike: each writes to its position of its cache row and
attends to that row up to itself. Batches are padded to a power of two; padding uses the last cache
row, which belongs to no request.
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
"""Maximum product of a graph's tokens and the cached positions that each attends to; attention
copies that many."""


class _Recorded(NamedTuple):
    """A graph with its input and output buffers. Shapes: N tokens, vocabulary size V."""

    graph: torch.cuda.CUDAGraph
    host: torch.Tensor
    """Inputs in pinned memory: token ids, rows, positions, output tokens; int64 [4, N]."""
    inputs: torch.Tensor
    """Copy of `host` on the device."""
    logits: torch.Tensor
    """Logits of the output tokens, [N, V]."""
    routes: torch.Tensor
    """Experts of each token, [N, L, K]."""


class GraphDecoder:
    """Runs steps of a policy over a KV cache on a GPU and returns logits on the host."""

    name = "cuda"
    """Name of this step in `EngineCapabilities.arithmetic`."""
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
        """Append the tokens of the batch to the cache; see `Decoder.step`."""
        # Tokens come in the order of their positions, so the batch may be split anywhere.
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
            # Once outside the graph, so that lazily loaded modules are loaded before recording.
            self._compute(policy, inputs, span)
            # Only this thread is restricted: others write the next version's weights meanwhile.
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
    """Return the weighted sum of the outputs of each token's experts, for [N, d]."""
    experts = layer.experts
    rounded = round_to(x, experts.expert_format)
    gate, up = (rounded @ experts.gate_up.transpose(1, 2)).chunk(2, dim=-1)
    activation = round_to(F.silu(gate) * up, experts.expert_format)
    outputs = activation @ experts.down.transpose(1, 2)
    tokens = torch.arange(len(x), device=x.device).unsqueeze(1)
    return combine(outputs[routing.experts, tokens], routing.weights)


def _rounded_up(count: int, least: int) -> int:
    """Return the next power of two from `count` on, but at least `least`."""
    return max(least, 1 << (count - 1).bit_length())
