"""Recorded routes in the routers of transformers models.

A router gives (logits, weights, ids), and its weights follow from its logits and from whichever
experts are chosen. So recorded ids take the place of its choice, and the weights are computed from
the scores of this pass: gradients reach the router.

    softmax          over all experts, normalized over the chosen ones
    chosen softmax   over the chosen experts alone
    sigmoid          normalized over the chosen ones, scaled; the bias is in the choice alone

A forward pass of activation checkpointing routes as the one before: routes stay until the next.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.kernels.reference.routing import ROUTE_FREE

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits [T, E], weights [T, K] and int64 ids [T, K] of a router."""
Weigh = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(router, logits [T, E], ids [T, K]) -> weights [T, K]."""


def _softmax_weights(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, ids)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _chosen_softmax_weights(_router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, ids).softmax(-1)


def _sigmoid_weights(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


ROUTERS: dict[str, tuple[str, Weigh]] = {
    "deepseek_v3": ("DeepseekV3TopkRouter", _sigmoid_weights),
    "dots1": ("Dots1TopkRouter", _sigmoid_weights),
    "glm4_moe": ("Glm4MoeTopkRouter", _sigmoid_weights),
    "glm4_moe_lite": ("Glm4MoeLiteTopkRouter", _sigmoid_weights),
    "gpt_oss": ("GptOssTopKRouter", _chosen_softmax_weights),
    "granitemoe": ("GraniteMoeTopKRouter", _chosen_softmax_weights),
    "mixtral": ("MixtralTopKRouter", _softmax_weights),
    "olmoe": ("OlmoeTopKRouter", _softmax_weights),
    "qwen2_moe": ("Qwen2MoeTopKRouter", _softmax_weights),
    "qwen3_5_moe_text": ("Qwen3_5MoeTopKRouter", _softmax_weights),
    "qwen3_moe": ("Qwen3MoeTopKRouter", _softmax_weights),
    "qwen3_next": ("Qwen3NextTopKRouter", _softmax_weights),
}
"""Model type -> its router's class, and how it weighs experts; the types are those of
`policy/hf/foreign.py` and `qwen3_moe`."""


class RouteReplay:
    """The routers of one model, and the routes of the forward pass in progress."""

    def __init__(self, model: nn.Module, model_type: str) -> None:
        """Take the place of the routers' forward passes.

        Args:
            model: of transformers, with its decoder layers as `model.layers`.
            model_type: one of `ROUTERS`; a model of any other has no routers.

        """
        class_name, self._weigh = ROUTERS.get(model_type, ("", _softmax_weights))
        self._recorded: torch.Tensor | None = None
        self._used: dict[int, torch.Tensor] = {}
        self._flips: dict[int, torch.Tensor] = {}
        layers = model.get_submodule("model.layers")
        assert isinstance(layers, nn.ModuleList)
        self.num_layers = len(layers)
        """L; of these, the first may be dense: what is recorded of them is not read."""
        for name, module in model.named_modules():
            if type(module).__name__ == class_name:
                layer = int(name.removeprefix("model.layers.").partition(".")[0])
                module.forward = partial(self._route, layer, module, module.forward)
                self._used[layer] = torch.empty(0)
        self.layers = sorted(self._used)
        """Layers that have a router."""

    def start(self, recorded: torch.Tensor | None) -> None:
        """Begin a forward pass over T tokens.

        Args:
            recorded: [T, L, K] int64 expert ids to replay, rows of `ROUTE_FREE` routed freely; None
                routes all tokens freely.

        """
        self._recorded = recorded
        self._flips.clear()

    def used(self, num_tokens: int) -> torch.Tensor:
        """Return the experts of the last pass, [T, L, K]; 0 in layers without a router."""
        if not self.layers:
            return torch.zeros(num_tokens, self.num_layers, 0, dtype=torch.int64)
        found = self._used[self.layers[0]]
        nothing = torch.zeros_like(found)
        return torch.stack([self._used.get(i, nothing) for i in range(self.num_layers)], dim=1)

    def flips(self) -> torch.Tensor:
        """Return [L]: recorded ids of the last pass that each router would not have chosen."""
        nothing = torch.zeros((), dtype=torch.int64)
        return torch.stack([self._flips.get(i, nothing).cpu() for i in range(self.num_layers)])

    def _route(
        self, layer: int, router: nn.Module, forward: Callable[..., Routing], hidden: torch.Tensor
    ) -> Routing:
        logits, weights, ids = forward(hidden)
        if self._recorded is not None:
            recorded = self._recorded[:, layer]
            is_recorded = recorded[:, :1] != ROUTE_FREE
            chosen = torch.where(is_recorded, recorded, ids)
            is_flipped = (chosen[:, :, None] != ids[:, None]).all(2)
            self._flips[layer] = is_flipped.sum()
            ids = chosen
            weights = self._weigh(router, logits, ids).to(weights.dtype)
        self._used[layer] = ids
        return logits, weights, ids
