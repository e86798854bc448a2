"""The expert layer in training: tokens are sorted by expert, with one pair of matmuls per expert.

Each expert gets a contiguous block of rows, so only the chosen experts are computed. The slots of a
token are summed in slot order, and gradients are gathered, never scattered, so forward and backward
passes are reproducible bit for bit at a fixed thread count.

The operands of the matmuls (weights and inputs) may be rounded to the values of a number format, in
blocks along the summed dimension; sums stay in float32, and gradients pass straight through.
MXFP8 has 32 E4M3 elements per power-of-two scale. NVFP4 has 16 E2M1 elements per E4M3 scale, and a
float32 scale per token. `kernels/reference/quantize.py` defines the rounding.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from penstock.actors.policy.operations import combine, rounded_mxfp8
from penstock.kernels.reference.quantize import nvfp4_dequantize, nvfp4_rows


def round_to(values: torch.Tensor, expert_format: str) -> torch.Tensor:
    """Round float32 [..., M, K] along K to the values of a format; bf16 returns them unchanged."""
    if expert_format == "mxfp8":
        return rounded_mxfp8(values)
    if expert_format == "nvfp4":
        # A copy: FSDP could not free memory that numpy shares.
        rows = nvfp4_rows(values.clone().flatten(0, -2).numpy())
        return torch.from_numpy(nvfp4_dequantize(*rows)).view(values.shape)
    return values


class StraightThrough(torch.autograd.Function):
    """Rounding with a straight-through gradient (arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, expert_format: str) -> torch.Tensor:
        """See `round_to`."""
        return round_to(values.detach(), expert_format)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient unchanged."""
        return grad_outputs[0], None


class Dispatch(NamedTuple):
    """Assignment of T*K slots (K per token) to experts."""

    order: torch.Tensor
    """Slots sorted by expert, stable, [T*K]."""
    inverse: torch.Tensor
    """Sorted position of each slot, [T*K]."""
    rows: torch.Tensor
    """Token of each sorted slot, [T*K]."""
    blocks: list[tuple[int, slice]]
    """Sorted slots of each expert that has any, as (expert, slice)."""

    def times(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiply sorted rows [T*K, m] by the weights of their experts [E, m, n] -> [T*K, n]."""
        # Into slices of one result, which saves a concatenation.
        out = rows.new_empty(rows.shape[0], weights.shape[2])
        for expert, block in self.blocks:
            torch.mm(rows[block], weights[expert], out=out[block])
        return out

    def outer(self, left: torch.Tensor, right: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Sum the outer products of left [T*K, m] and right [T*K, n] per expert -> [E, m, n]."""
        out = torch.zeros_like(like)
        for expert, block in self.blocks:
            torch.mm(left[block].t(), right[block], out=out[expert])
        return out


class ExpertMlp(torch.autograd.Function):
    """Weighted sum over a token's experts of `down(silu(gate(x)) * up(x))`.

    Shapes: x [T, d], expert_ids [T, K] int64, expert_weights [T, K], gate_up [E, 2f, d],
    down [E, d, f] -> [T, d]. The inner activations are rounded to `expert_format` here; the caller
    rounds the other operands.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd passes tensors one by one
        ctx: Any,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        expert_format: str = "bf16",
    ) -> torch.Tensor:
        """Return the weighted sums [T, d] and save tensors for the backward pass."""
        dispatch = sort_by_expert(expert_ids, gate_up.shape[0])
        kept = run_experts(x, dispatch, gate_up, down, expert_format)
        x_sorted, hidden, activation, per_slot = kept
        ctx.save_for_backward(x_sorted, hidden, activation, per_slot, expert_weights, gate_up, down)
        ctx.dispatch = dispatch
        return combine(per_slot, expert_weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, expert_weights, gate_up and down."""
        (grad,) = grad_outputs
        x_sorted, hidden, activation, per_slot, weights, gate_up, down = ctx.saved_tensors
        dispatch: Dispatch = ctx.dispatch
        grad = grad.contiguous()
        grad_weights = torch.bmm(per_slot, grad.unsqueeze(2)).squeeze(2)
        sorted_weights = weights.reshape(-1).index_select(0, dispatch.order)
        grad_sorted = grad.index_select(0, dispatch.rows).mul_(sorted_weights.unsqueeze(1))
        # Frozen weights, beside which adapters train, need no gradient.
        has_grads = ctx.needs_input_grad
        grad_down = dispatch.outer(grad_sorted, activation, down) if has_grads[4] else None
        grad_hidden = _gated_silu_backward(dispatch.times(grad_sorted, down), hidden)
        grad_gate_up = dispatch.outer(grad_hidden, x_sorted, gate_up) if has_grads[3] else None
        grad_x_sorted = dispatch.times(grad_hidden, gate_up)
        # Gathered and summed in slot order; scattering would add in any order.
        grad_x = grad_x_sorted.index_select(0, dispatch.inverse).view_as(per_slot).sum(1)
        return grad_x, None, grad_weights, grad_gate_up, grad_down, None


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> Dispatch:
    """Sort the slots of [T, K] expert ids by expert."""
    flat_ids = expert_ids.reshape(-1)
    # Stable, so that the rows of an expert, and with them its sums, have a fixed order.
    order = torch.argsort(flat_ids, stable=True)
    inverse = torch.argsort(order)
    blocks, start = [], 0
    counts = torch.bincount(flat_ids, minlength=num_experts).tolist()
    for expert, count in enumerate(counts):
        if count:
            blocks.append((expert, slice(start, start + count)))
        start += count
    return Dispatch(order, inverse, order // expert_ids.shape[1], blocks)


def run_experts(
    x: torch.Tensor,
    dispatch: Dispatch,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_format: str = "bf16",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the experts of each token in [T, d].

    Returns:
        Sorted inputs [T*K, d], gate and up projections [T*K, 2f], activations [T*K, f], and the
        unweighted outputs by slot [T, K, d].

    """
    x_sorted = x.index_select(0, dispatch.rows)
    hidden = dispatch.times(x_sorted, gate_up.transpose(1, 2))
    gate, up = hidden.chunk(2, dim=1)
    activation = round_to(F.silu(gate).mul_(up), expert_format)
    output = dispatch.times(activation, down.transpose(1, 2))
    per_slot = output.index_select(0, dispatch.inverse).view(x.shape[0], -1, x.shape[1])
    return x_sorted, hidden, activation, per_slot


def _gated_silu_backward(grad: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=1)
    result = torch.empty_like(hidden)
    grad_gate, grad_up = result.chunk(2, dim=1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return result
