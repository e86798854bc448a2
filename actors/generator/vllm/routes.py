"""Notes which experts computed every token, by the slot of vLLM's cache that holds it.

A slot holds the keys and values of one token, so a request that reuses a cached prefix reuses its
routes, and nothing has to be known of requests until one ends.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.actors.generator.vllm.library import of_vllm
from penstock.messages.errors import ConfigError


class RouteRecorder:
    """Routes and versions of all slots of one worker's cache."""

    def __init__(self, runner: Any, route_dtype: np.dtype, num_per_token: int) -> None:
        """Attach to the routers of the runner's model.

        Args:
            runner: vLLM's model runner.
            route_dtype: Of the policy's routes.
            num_per_token: Experts of a token in each layer; 0 in a dense model.

        Raises:
            ConfigError: A router whose choice cannot be seen.

        """
        self._runner = runner
        self._block = runner.cache_config.block_size
        routers = _routers(runner.get_model())
        if num_per_token and not routers:
            text = "expected a model whose routers can be followed; router replay needs them"
            raise ConfigError(f"generator.engine vllm: {text}")
        for index, router in enumerate(routers):
            router.set_capture_fn(partial(self._capture, index))
        self._step: list[torch.Tensor | None] = [None] * len(routers)
        num_slots = self._block * runner.kv_cache_config.num_blocks
        self._routes = np.zeros((num_slots, len(routers), num_per_token), route_dtype)
        self._versions = np.zeros(num_slots, np.int32)

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._step[layer] = experts

    def note(self, num_scheduled: dict[str, int], policy_version: int) -> None:
        """Take in a step that was computed: how many tokens of each request."""
        spans: list[np.ndarray] = []
        for name in self._runner.input_batch.req_ids:
            state = self._runner.requests[name]
            start = state.num_computed_tokens
            spans.append(self._slots(state.block_ids[0], start, start + num_scheduled[name]))
        slots = np.concatenate(spans)
        self._versions[slots] = policy_version
        for layer, experts in enumerate(self._step):
            assert experts is not None, "every layer routes in every step"
            self._routes[slots, layer] = experts[: len(slots)].cpu().numpy()

    def read(self, block_ids: Sequence[int], num_tokens: int) -> tuple[bytes, bytes]:
        """Return routes and versions of a request's first tokens, as bytes."""
        slots = self._slots(block_ids, 0, num_tokens)
        return self._routes[slots].tobytes(), self._versions[slots].tobytes()

    def _slots(self, block_ids: Sequence[int], start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = np.array(block_ids, np.int64)[positions // self._block]
        return blocks * self._block + positions % self._block


def _routers(model: torch.nn.Module) -> list[Any]:
    """Return the routers of a model, in the order of its layers."""
    layers = "model_executor.layers.fused_moe"
    moe_runner = of_vllm(f"{layers}.layer.MoERunner")
    base_router = of_vllm(f"{layers}.router.base_router.BaseRouter")
    runners: list[Any] = [module for module in model.modules() if isinstance(module, moe_runner)]
    for runner in runners:
        if runner.is_monolithic or not isinstance(runner.router, base_router):
            name = type(runner.router).__name__
            text = f"the experts of {name} choose inside a kernel, where router replay cannot see"
            raise ConfigError(f"generator.engine vllm: {text}")
    return [runner.router for runner in runners]
