"""The expert layer of training: tokens sorted by expert, one pair of matmuls per expert.

Each expert sees a contiguous block of rows, so the work is that of the chosen experts only; on a
GPU, where a call costs more than zeros, one product has all blocks, filled up to equal size. The
slots of a token are summed in slot order and gradients are gathered, never scattered, so forward
and backward are reproducible bit for bit at a fixed thread count.

The operands of the matmuls, weights and inputs, may be rounded to a number format's values, in
blocks along the summed dimension; the sums stay in float32 and gradients pass straight through.
MXFP8: 32 E4M3 elements under one power of two. NVFP4: 16 E2M1 elements under an E4M3 scale, and a
float32 scale per token. The rules are in `kernels/reference/quantize.py`.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from penstock.actors.policy import operations
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
    padding: "Padding | None"
    """On a GPU: all blocks in one product instead of one each."""

    def times(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiply sorted rows [T*K, m] by their experts' weights [E, m, n] -> [T*K, n]."""
        if self.padding is not None:
            return self.padding.cut(torch.bmm(self.padding.padded(rows), weights))
        out = rows.new_empty(rows.shape[0], weights.shape[2])
        for expert, block in self.blocks:
            torch.mm(rows[block], weights[expert], out=out[block])
        return out

    def outer(self, left: torch.Tensor, right: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Sum left [T*K, m] transposed times right [T*K, n] over each expert's rows -> `like`."""
        if self.padding is not None:
            padded = self.padding.padded(left).transpose(1, 2)
            return torch.bmm(padded, self.padding.padded(right))
        out = torch.zeros_like(like)
        for expert, block in self.blocks:
            torch.mm(left[block].t(), right[block], out=out[expert])
        return out


class Padding(NamedTuple):
    """Every expert's rows, filled up with zeros to the most that one has, C."""

    places: torch.Tensor
    """[E, C]: the sorted row, or T*K for a zero."""
    rows: torch.Tensor
    """[T*K]: where each sorted row lies in [E * C]."""

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> "Padding":
        """Lay out experts that have `counts` rows each."""
        sizes = np.array(counts)
        ends, column = sizes.cumsum(), np.arange(max(counts))
        is_row = column < sizes[:, None]
        places = np.where(is_row, (ends - sizes)[:, None] + column, ends[-1])
        both = np.concatenate([places.ravel(), np.flatnonzero(is_row)])
        flat, rows = torch.from_numpy(both).to(device).split([places.size, int(ends[-1])])
        return cls(flat.view(places.shape), rows)

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """[T*K, m] -> [E, C, m]."""
        zero = rows.new_zeros(1, rows.shape[1])
        chosen = torch.cat((rows, zero)).index_select(0, self.places.view(-1))
        return chosen.view(*self.places.shape, -1)

    def cut(self, padded: torch.Tensor) -> torch.Tensor:
        """[E, C, n] -> [T*K, n]."""
        return padded.flatten(0, 1).index_select(0, self.rows)


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
        dispatch: Dispatch = ctx.dispatch
        grad = grad.contiguous()
        grad_weights = torch.bmm(per_slot, grad.unsqueeze(2)).squeeze(2)
        sorted_weights = weights.reshape(-1).index_select(0, dispatch.order)
        grad_sorted = grad.index_select(0, dispatch.rows).mul_(sorted_weights.unsqueeze(1))
        grad_down = dispatch.outer(grad_sorted, activation, down)
        grad_hidden = _gated_silu_backward(dispatch.times(grad_sorted, down), hidden)
        grad_gate_up = dispatch.outer(grad_hidden, x_sorted, gate_up)
        grad_x_sorted = dispatch.times(grad_hidden, gate_up)
        grad_x = grad_x_sorted.index_select(0, dispatch.inverse).view_as(per_slot).sum(1)
        return grad_x, None, grad_weights, grad_gate_up, grad_down, None


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> Dispatch:
    """Plan the work of [T, K] expert ids."""
    flat_ids = expert_ids.reshape(-1)
    order = torch.argsort(flat_ids, stable=True)
    inverse = torch.argsort(order)
    blocks, start = [], 0
    counts = torch.bincount(flat_ids, minlength=num_experts).tolist()
    for expert, count in enumerate(counts):
        if count:
            blocks.append((expert, slice(start, start + count)))
        start += count
    has_padding = operations.has_kernels(expert_ids)
    padding = Padding.of(counts, expert_ids.device) if has_padding else None
    return Dispatch(order, inverse, order // expert_ids.shape[1], blocks, padding)


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
