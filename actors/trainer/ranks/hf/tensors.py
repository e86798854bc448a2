"""Which tensors of the checkpoint format a parameter of a transformers model holds.

transformers stacks the experts of a layer and fuses two of their matrices; all other parameters
are tensors of the format under their own names. In each case a range of rows (of dim 0) of a
parameter, which is what a rank holds under FSDP2 and under expert parallelism alike, is some whole
runs of the format's tensors:

    mlp.experts.gate_up_proj [E, 2f, d]   row e: experts.e.gate_proj, .up_proj [f, d]
    mlp.experts.down_proj [E, d, f]       row e: experts.e.down_proj [d, f]
    anything else [n, ...]                rows a to b of the tensor of that name
"""

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, as_numpy
from penstock.actors.policy.snapshot import TensorRun

_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"


def tensor_runs(name: str, rows: torch.Tensor, first: int) -> list[tuple[str, int, torch.Tensor]]:
    """Return what some rows of a parameter hold: (tensor, first flat element in it, views of them).

    Args:
        name: of the parameter.
        rows: [n, ...] those rows, contiguous.
        first: the number of the first of them.

    """
    if not name.endswith((_GATE_UP, _DOWN)):
        return [(name, first * rows[:1].numel(), rows)] if rows.numel() else []
    runs: list[tuple[str, int, torch.Tensor]] = []
    for expert, matrix in enumerate(rows, first):
        names = _expert_tensors(name, expert)
        runs += [(n, 0, part) for n, part in zip(names, matrix.chunk(len(names)), strict=True)]
    return runs


def published_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of the tensors that are published of a model, by name."""
    found: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device="meta")
        found |= {each: list(part.shape) for each, _, part in tensor_runs(name, whole, 0)}
    return found | {name: list(buffer.shape) for name, buffer in published_buffers(model).items()}


def published_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are tensors of the format: float32 biases of routers.

    They do not train, and are published as they are.
    """
    persistent = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def held_runs(model: nn.Module, *, has_buffers: bool) -> list[TensorRun]:
    """Return copies of what this rank holds, rounded as published: over all ranks, everything once.

    Args:
        model: whose parameters are cut over the ranks by rows.
        has_buffers: whether this rank publishes those, which every rank has.

    Raises:
        ValueError: A parameter is cut otherwise.

    """
    runs: list[TensorRun] = []
    for name, parameter in model.named_parameters():
        for each, start, values in tensor_runs(name, *_held_rows(parameter)):
            rounded = values.to(PUBLISHED_DTYPE, copy=True)
            runs.append(TensorRun(each, start, as_numpy(rounded).reshape(-1)))
    if has_buffers:
        for name, buffer in published_buffers(model).items():
            bits = as_numpy(buffer.to(torch.float32, copy=True)).reshape(-1)
            runs.append(TensorRun(name, 0, bits.view(np.uint32)))
    return runs


def _held_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's rows of a parameter, and the number of the first of them."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(placement.is_replicate() for placement in placements):
        raise ValueError(f"expected every row on one rank, got {placements}")
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    if tuple(shape[1:]) != tuple(parameter.shape[1:]):
        raise ValueError(f"expected shards along dim 0, got {placements}")
    return parameter.to_local().detach(), offset[0]


def _expert_tensors(name: str, expert: int) -> list[str]:
    """Return the tensors of one row of a parameter that stacks experts."""
    if name.endswith(_GATE_UP):
        prefix = name.removesuffix("gate_up_proj")
        return [f"{prefix}{expert}.{part}_proj.weight" for part in ("gate", "up")]
    return [f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"]
