"""Checks that all kernels make before anything is read."""

import torch

from penstock.kernels.errors import KernelArgumentError

FLOATS = (torch.float32, torch.bfloat16)
_ALIGNED_BYTES = 16
"""Kernels read this much at once; torch allocates more, but a view may begin anywhere."""


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """Return the tensor, contiguous and aligned, if its shape (None: any size) and dtype fit.

    Raises:
        KernelArgumentError: they do not.

    """
    fits = len(shape) == tensor.dim() and all(
        want in {None, got} for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise KernelArgumentError(
            f"{name}: expected [{sizes}] of {names}, got {list(tensor.shape)} of {tensor.dtype}"
        )
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNED_BYTES else tensor


def check_multiple(name: str, size: int, of: int) -> None:
    """Raise KernelArgumentError unless a dimension is a positive multiple."""
    if size <= 0 or size % of:
        raise KernelArgumentError(f"{name}: expected a positive multiple of {of}, got {size}")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise KernelArgumentError unless low <= value <= high."""
    if not low <= value <= high:
        raise KernelArgumentError(f"{name}: expected {low}..{high}, got {value}")
