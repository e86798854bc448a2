"""Row-wise kernels whose bits depend on the row alone, not on the batch around it."""

import torch

from penstock.kernels.backend import KernelBackend
from penstock.kernels.ops.backends import backend_for
from penstock.kernels.ops.check import FLOATS, check_range, check_tensor
from penstock.kernels.ops.values import check_values
from penstock.kernels.reference.rows import LOGIT_CHUNK

NUM_LOGITS_MAX = 512 * LOGIT_CHUNK


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight: [..., H] and [H], one dtype -> [..., H].

    Computes in float32 in the frozen order and rounds once.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.

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
    """Log-probability of each target: float32 or bfloat16 [N, V], int64 [N] -> float32 [N].

    Reads the logits once and writes no [N, V] intermediate. -inf logits have probability 0; a row
    with a NaN or +inf gives NaN.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit, or a target outside 0..V-1.

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
