"""The cases of `python -m tests.lab kernels`: each kernel at a shape, and torch's equivalent."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch

from penstock.kernels import ops

Run = Callable[[], object]
_NUM_COPIES = 8
"""Of inputs that the GPU's cache could hold: calls take them in turn, so that memory is read."""


class KernelCase(NamedTuple):
    """One measurement."""

    shape: str
    kernel: Run
    library: Run | None
    """The nearest that torch has; None where it has nothing."""
    num_bytes: int
    """Read and written, each once."""
    num_operations: int = 0
    """2 M N K of a product; else 0."""


def list_cases() -> list[tuple[str, KernelCase]]:
    """Return each kernel by name, at a large model's sizes."""
    tokens = 131072
    return [
        *_routing_cases(tokens // 8),
        *_delta_cases(_random(tokens, 7168).bfloat16().flatten()),
    ]


def _routing_cases(num_tokens: int) -> list[tuple[str, KernelCase]]:
    routes = torch.randint(0, 384, (num_tokens, 60, 8), device="cuda", dtype=torch.int16)
    packed = ops.routes_pack(routes, 384)
    runs = [partial(ops.routes_pack, ids, 384) for ids in _copies(routes)]
    moved = 2 * routes.numel() + packed.numel()
    return [("routes_pack", KernelCase(f"{num_tokens}x60x8 of 384", _in_turn(runs), None, moved))]


def _delta_cases(base: torch.Tensor) -> list[tuple[str, KernelCase]]:
    is_changed = torch.rand(len(base), device=base.device) < 0.03
    wide = is_changed.nonzero()[:, 0]
    positions, values = wide.int(), -base[wide]
    apply = partial(ops.delta_apply, base.clone(), positions, values)
    library = partial(base.clone().index_copy_, 0, wide, values)
    case = KernelCase(f"{len(base)}, 3%", apply, library, 8 * len(positions))
    return [("delta_apply", case)]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def _copies(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone() for _ in range(_NUM_COPIES)]


def _in_turn(runs: Sequence[Run]) -> Run:
    """Return what does the next of some runs each time it is called."""
    turns = cycle(runs)

    def run() -> object:
        return next(turns)()

    return run
