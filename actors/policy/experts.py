"""The expert layer of training: tokens sorted by expert, one pair of matmuls per expert.

Each expert sees a contiguous block of rows, so the work is that of the chosen experts only. The
slots of a token are summed in slot order and gradients are gathered, never scattered, so forward
and backward are reproducible bit for bit at a fixed thread count.

The operands of the matmuls, weights and inputs, may be rounded to a number format's values, in
blocks along the summed dimension; the sums stay in float32 and gradients pass straight through.
MXFP8: 32 E4M3 elements under one power of two. NVFP4: 16 E2M1 elements under an E4M3 scale, and a
float32 scale per token. The rules are in `kernels/reference/formats.py`.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from penstock.actors.policy.operations import combine, rounded_mxfp8
from penstock.kernels.reference.quantize import nvfp4_dequantize, nvfp4_rows


def round_to(values: torch.Tensor, expert_format: str) -> torch.Tensor:
    """Round float32 [..., M, K] along K to the values of a format; bf16 leaves them as they are."""
    if expert_format == "mxfp8":
        return rounded_mxfp8(values)
    if expert_format == "nvfp4":
        rows = nvfp4_rows(values.clone().flatten(0, -2).numpy())  # FSDP must be free to free it.
        return torch.from_numpy(nvfp4_dequantize(*rows)).view(values.shape)
    return values


class StraightThrough(torch.autograd.Function):
    """Rounds in the forward pass; in the backward pass it is not there (arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, expert_format: str) -> torch.Tensor:
        """See `round_to`."""
        return round_to(values.detach(), expert_format)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Hand the gradient on."""
        return grad_outputs[0], None


class Dispatch(NamedTuple):
    """Which rows go to which expert."""

    order: torch.Tensor
    """[T*K]: slots sorted by expert, stable."""
    inverse: torch.Tensor
    """[T*K]: where each slot went."""
    rows: torch.Tensor
    """[T*K]: the token of each sorted slot."""
    blocks: list[tuple[int, slice]]
    """(expert, its rows in the sorted order), for every expert that has any."""


class ExpertMlp(torch.autograd.Function):
    """Weighted sum over a token's experts of `down(silu(gate(x)) * up(x))`.

    Shapes: x [T, d], expert_ids [T, K] int64, expert_weights [T, K], gate_up [E, 2f, d],
    down [E, d, f] -> [T, d]. The inner activations are rounded to `expert_format`; the caller
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
        """Compute [T, d] and keep what the backward pass reads."""
        dispatch = sort_by_expert(expert_ids, gate_up.shape[0])
        kept = run_experts(x, dispatch, gate_up, down, expert_format)
        x_sorted, hidden, activation, per_slot = kept
        ctx.save_for_backward(x_sorted, hidden, activation, per_slot, expert_weights, gate_up, down)
        ctx.dispatch = dispatch
        return combine(per_slot, expert_weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return gradients of x, expert_weights, gate_up and down."""
        (grad,) = grad_outputs
        x_sorted, hidden, activation, per_slot, weights, gate_up, down = ctx.saved_tensors
        order, inverse, rows, blocks = ctx.dispatch
        grad = grad.contiguous()
        grad_weights = torch.bmm(per_slot, grad.unsqueeze(2)).squeeze(2)
        sorted_weights = weights.reshape(-1).index_select(0, order)
        grad_sorted = grad.index_select(0, rows).mul_(sorted_weights.unsqueeze(1))
        grad_down = torch.zeros_like(down)
        grad_activation = torch.empty_like(activation)
        for expert, block in blocks:
            torch.mm(grad_sorted[block], down[expert], out=grad_activation[block])
            torch.mm(grad_sorted[block].t(), activation[block], out=grad_down[expert])
        grad_hidden = _gated_silu_backward(grad_activation, hidden)
        grad_gate_up = torch.zeros_like(gate_up)
        grad_x_sorted = torch.empty_like(x_sorted)
        for expert, block in blocks:
            torch.mm(grad_hidden[block], gate_up[expert], out=grad_x_sorted[block])
            torch.mm(grad_hidden[block].t(), x_sorted[block], out=grad_gate_up[expert])
        grad_x = grad_x_sorted.index_select(0, inverse).view_as(per_slot).sum(1)
        return grad_x, None, grad_weights, grad_gate_up, grad_down, None


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> Dispatch:
    """Plan the work of [T, K] expert ids."""
    flat_ids = expert_ids.reshape(-1)
    order = torch.argsort(flat_ids, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    blocks, start = [], 0
    for expert, count in enumerate(torch.bincount(flat_ids, minlength=num_experts).tolist()):
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
    """Run [T, d] through its experts.

    Returns:
        Sorted inputs [T*K, d], gate and up [T*K, 2f], activations [T*K, f], and the unweighted
        outputs by slot [T, K, d].

    """
    x_sorted = x.index_select(0, dispatch.rows)
    hidden = x.new_empty(x_sorted.shape[0], gate_up.shape[1])
    for expert, block in dispatch.blocks:
        torch.mm(x_sorted[block], gate_up[expert].t(), out=hidden[block])
    gate, up = hidden.chunk(2, dim=1)
    activation = round_to(F.silu(gate).mul_(up), expert_format)
    output = torch.empty_like(x_sorted)
    for expert, block in dispatch.blocks:
        torch.mm(activation[block], down[expert].t(), out=output[block])
    per_slot = output.index_select(0, dispatch.inverse).view(x.shape[0], -1, x.shape[1])
    return x_sorted, hidden, activation, per_slot


def _gated_silu_backward(grad: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=1)
    result = torch.empty_like(hidden)
    grad_gate, grad_up = result.chunk(2, dim=1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return result
