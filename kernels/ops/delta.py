"""Application of a difference between two versions to flat weights, in place."""

import torch

from penstock.kernels.backend import KernelArgumentError, KernelBackend
from penstock.kernels.ops.backends import backend_for
from penstock.kernels.ops.checks import check_tensor, check_values

_BITS = (
    *(torch.uint8, torch.int8, torch.float8_e4m3fn),
    *(torch.int16, torch.uint16, torch.bfloat16, torch.float16),
    *(torch.int32, torch.uint32, torch.float32),
)


def delta_apply(
    weights: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    *,
    backend: KernelBackend | None = None,
) -> None:
    """Overwrite flat weights [N] at positions int32 [C] with values [C], in place.

    This is the last stage of a weight update in `actors/relay`: positions and values are already
    decoded and verified, so generation pauses only for this call. Applying it twice is harmless.

    Raises:
        KernelArgumentError: The weights are not contiguous, a dtype is wrong, or a position is
            outside 0..N-1; nothing is written. On a GPU, positions are checked asynchronously (see
            `raise_deferred_errors`): those outside are skipped and all others are written.

    """
    if not weights.is_contiguous():
        raise KernelArgumentError("weights: expected a contiguous tensor, to be written in place")
    check_tensor("weights", weights, (None,), _BITS)
    positions = check_tensor("positions", positions, (None,), (torch.int32,))
    values = check_tensor("values", values, tuple(positions.shape), (weights.dtype,))
    if not positions.numel():
        return
    check_values("positions", positions, 0, weights.numel() - 1, backend)
    # A view, so that the caller's memory is written; the checked copy might be another one.
    bits = _as_bits(weights.detach())
    backend_for(weights, backend).delta_apply(bits, positions, _as_bits(values))


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    names = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(names[tensor.element_size()])
