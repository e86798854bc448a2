"""Matrix products with one constant order of additions, whatever the number of rows."""

import torch

from penstock.kernels.backend import KernelBackend, Mxfp8
from penstock.kernels.ops.backends import backend_for
from penstock.kernels.ops.check import FLOATS, check_multiple, check_tensor
from penstock.kernels.ops.values import check_values
from penstock.kernels.reference.quantize import MX_BLOCK


def matmul(
    x: torch.Tensor, weight: torch.Tensor, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Multiply [M, K] by the transpose of [N, K], both of one dtype -> [M, N] of that dtype.

    float32 is the same bits on every backend: one frozen sum an output. bfloat16 accumulates in
    float32 and rounds once; on CUDA it runs on tensor cores with a constant split of K, added in
    order: bits are the same for any M, but not those of the CPU.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit; on CUDA, K not a multiple of 64.

    """
    x = check_tensor("x", x, (None, None), FLOATS)
    weight = check_tensor("weight", weight, (None, x.shape[1]), (x.dtype,))
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel():
        backend_for(x, backend).matmul(x, weight, out)
    return out


def mxfp8_grouped_matmul(
    x: torch.Tensor, weight: Mxfp8, offsets: torch.Tensor, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Multiply each expert's rows by its MXFP8 weight, dequantized on the way -> [R, N].

    Args:
        x: float32 or bfloat16 [R, K] (CUDA: bfloat16), sorted by expert.
        weight: codes [E, N, K] with 1x32 scales [E, N, K/32].
        offsets: int32 [E + 1]; expert e has the rows offsets[e] to offsets[e + 1].
        backend: see `penstock.kernels.ops`.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit, or offsets that do not rise from 0
            to R.

    """
    x = check_tensor("x", x, (None, None), FLOATS)
    check_multiple("x: K", x.shape[1], MX_BLOCK)
    num_columns = x.shape[1]
    codes = check_tensor("weight.codes", weight.codes, (None, None, num_columns), (torch.uint8,))
    num_experts, width, _ = codes.shape
    shape = (num_experts, width, num_columns // MX_BLOCK)
    scales = check_tensor("weight.scales", weight.scales, shape, (torch.uint8,))
    offsets = check_tensor("offsets", offsets, (num_experts + 1,), (torch.int32,))
    num_rows = x.shape[0]
    check_values("offsets: first", offsets[:1], 0, 0, backend)
    check_values("offsets: last", offsets[-1:], num_rows, num_rows, backend)
    check_values("offsets: rows of an expert", offsets.diff(), 0, num_rows, backend)
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if out.numel():
        backend_for(x, backend).mxfp8_grouped_matmul(x, Mxfp8(codes, scales), offsets, out)
    return out
