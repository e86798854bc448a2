"""Norms, log probabilities and matrix products whose rows do not depend on the batch."""

import torch

from penstock.kernels.backend import KernelBackend, Mxfp8
from penstock.kernels.ops.backends import backend_for
from penstock.kernels.ops.checks import (
    FLOATS,
    check_multiple,
    check_range,
    check_tensor,
    check_values,
)
from penstock.kernels.reference.quantize import MX_BLOCK
from penstock.kernels.reference.rows import LOGIT_CHUNK

NUM_LOGITS_MAX = 512 * LOGIT_CHUNK


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight, for x [..., H] and weight [H] of one dtype.

    The result is computed in float32, in the order of the reference, and rounded once.

    Raises:
        KernelArgumentError: Shapes or dtypes do not fit.

    """
    flat = check_tensor("x", x.reshape(-1, x.shape[-1]), (None, None), FLOATS)
    weight = check_tensor("weight", weight, (flat.shape[1],), (flat.dtype,))
    out = torch.empty_like(flat)
    if out.numel():
        backend_for(flat, backend).rms_norm(flat, weight, float(eps), out)
    return out.view(x.shape)


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Return log probabilities of targets: float32 or bfloat16 [N, V], int64 [N] -> float32 [N].

    The logits are read once, without an [N, V] intermediate. Logits of -inf have probability 0; a
    row with NaN or +inf gives NaN.

    Raises:
        KernelArgumentError: Shapes or dtypes do not fit, or a target is outside 0..V-1.

    """
    logits = check_tensor("logits", logits, (None, None), FLOATS)
    num_rows, num_logits = logits.shape
    check_range("logits: vocabulary", num_logits, 1, NUM_LOGITS_MAX)
    targets = check_tensor("targets", targets, (num_rows,), (torch.int64,))
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return out
    check_values("targets", targets, 0, num_logits - 1, backend)
    backend_for(logits, backend).token_logprobs(logits, targets, out)
    return out


def matmul(
    x: torch.Tensor, weight: torch.Tensor, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Multiply [M, K] by the transpose of [N, K], both of one dtype -> [M, N] of that dtype.

    float32 results have the same bits on every backend: one fixed-order sum per output. bfloat16
    is accumulated in float32 and rounded once. On CUDA it runs on tensor cores, with a fixed split
    of K whose parts are added in order: bits do not depend on M, but differ from those of the CPU.

    Raises:
        KernelArgumentError: Shapes or dtypes do not fit, or, on CUDA, K is not a multiple of 64.

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
    """Multiply each expert's rows by its MXFP8 weight, dequantized on the fly -> [R, N].

    Args:
        x: Rows sorted by expert, float32 or bfloat16 [R, K] (CUDA: bfloat16).
        weight: Weights of the experts: codes [E, N, K] with 1x32 scales [E, N, K/32].
        offsets: Row offsets int32 [E + 1]; expert e has rows offsets[e] to offsets[e + 1].
        backend: Backend; see `penstock.kernels.ops`.

    Raises:
        KernelArgumentError: Shapes or dtypes do not fit, or offsets do not rise from 0 to R.

    """
    x = check_tensor("x", x, (None, None), FLOATS)
    check_multiple("x: K", x.shape[1], MX_BLOCK)
    num_columns = x.shape[1]
    codes = check_tensor("weight.codes", weight.codes, (None, None, num_columns), (torch.uint8,))
    num_experts, width, _ = codes.shape
    shape = (num_experts, width, num_columns // MX_BLOCK)
    scales = check_tensor("weight.scales", weight.scales, shape, (torch.uint8,))
    offsets = check_tensor("offsets", offsets, (num_experts + 1,), (torch.int32,))
    # Three checks that offsets rise from 0 to R, without reading them on the host.
    num_rows = x.shape[0]
    check_values("offsets: first", offsets[:1], 0, 0, backend)
    check_values("offsets: last", offsets[-1:], num_rows, num_rows, backend)
    check_values("offsets: rows of an expert", offsets.diff(), 0, num_rows, backend)
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if out.numel():
        backend_for(x, backend).mxfp8_grouped_matmul(x, Mxfp8(codes, scales), offsets, out)
    return out
