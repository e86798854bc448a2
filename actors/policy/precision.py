"""Number formats of the experts: exact emulation in float32, gradients straight through.

The operands of the experts' matmuls, weights and inputs, are rounded to the format's values in
blocks along the summed dimension; the sums themselves stay in float32. MXFP8: 32 E4M3 elements
under one power of two. NVFP4: 16 E2M1 elements under an E4M3 scale, and a float32 scale per token.
The rules are in `kernels/reference/formats.py`.
"""

from typing import Any

import torch

from penstock.kernels.decode.rounding import round_mxfp8
from penstock.kernels.reference.quantize import nvfp4_dequantize, nvfp4_rows


def round_to(values: torch.Tensor, expert_format: str) -> torch.Tensor:
    """Round float32 [..., M, K] along K to the values of a format; bf16 leaves them as they are."""
    if expert_format == "mxfp8":
        rounded = values.clone(memory_format=torch.contiguous_format)
        round_mxfp8(rounded.numpy())
        return rounded
    if expert_format == "nvfp4":
        rows = nvfp4_rows(values.flatten(0, -2).numpy())
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
