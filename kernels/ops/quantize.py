"""MXFP8 quantization; `kernels/reference/quantize.py` defines the rounding."""

import torch

from penstock.kernels.backend import KernelArgumentError, KernelBackend, Mxfp8
from penstock.kernels.ops.backends import backend_for
from penstock.kernels.ops.checks import FLOATS, check_multiple, check_tensor
from penstock.kernels.reference.quantize import MX_BLOCK


def mxfp8_quantize_rows(x: torch.Tensor, *, backend: KernelBackend | None = None) -> Mxfp8:
    """Quantize float32 or bfloat16 [..., M, K] in blocks of 32 along K.

    Raises:
        KernelArgumentError: The dtype is wrong, there are fewer than two dimensions, or K is not a
            multiple of 32.

    Example:
        >>> quantized = mxfp8_quantize_rows(torch.randn(8, 64, dtype=torch.bfloat16))
        >>> quantized.scales.shape, mxfp8_dequantize(quantized).dtype
        (torch.Size([8, 2]), torch.bfloat16)

    """
    flat = _matrix(x)
    rows = _empty(flat, by_rows=True)
    if flat.numel():
        backend_for(flat, backend).mxfp8_quantize(flat, rows, None)
    return _shaped(x, rows, by_rows=True)


def mxfp8_quantize_columns(x: torch.Tensor, *, backend: KernelBackend | None = None) -> Mxfp8:
    """Quantize float32 or bfloat16 [..., M, K] in blocks of 32 along M.

    Raises:
        KernelArgumentError: The dtype is wrong, or M or K is not a multiple of 32.

    """
    flat = _matrix(x, columns=True)
    columns = _empty(flat, by_rows=False)
    if flat.numel():
        backend_for(flat, backend).mxfp8_quantize(flat, None, columns)
    return _shaped(x, columns, by_rows=False)


def mxfp8_quantize_both(
    x: torch.Tensor, *, backend: KernelBackend | None = None
) -> tuple[Mxfp8, Mxfp8]:
    """Quantize by rows and by columns, as training needs, while reading [..., M, K] once."""
    flat = _matrix(x, columns=True)
    rows, columns = _empty(flat, by_rows=True), _empty(flat, by_rows=False)
    if flat.numel():
        backend_for(flat, backend).mxfp8_quantize(flat, rows, columns)
    return _shaped(x, rows, by_rows=True), _shaped(x, columns, by_rows=False)


def mxfp8_dequantize(
    quantized: Mxfp8, dtype: torch.dtype = torch.bfloat16, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Dequantize to [..., M, K]; the shape of the scales distinguishes rows from columns.

    Exact in float32 for scales 0..246 and in bfloat16 for scales 3..246. With other scales, values
    overflow to infinity or round to nearest even; scale 255 gives NaN.

    Raises:
        KernelArgumentError: The scales fit neither layout, or the dtype is neither of the two.

    """
    codes, scales = quantized
    if codes.dim() < 2 or scales.dim() != codes.dim() or dtype not in FLOATS:
        raise KernelArgumentError(
            "mxfp8_dequantize: expected codes and scales of the same two or more dimensions and "
            f"dtype float32 or bfloat16, got {codes.dim()}, {scales.dim()} and {dtype}"
        )
    # With blocks along columns there is one scale for 32 rows.
    by_rows = codes.shape[-2] == scales.shape[-2]
    flat_codes = check_tensor("codes", codes.flatten(0, -2), (None, None), (torch.uint8,))
    num_rows, num_columns = flat_codes.shape
    shape = (num_rows, num_columns // MX_BLOCK) if by_rows else (num_rows // MX_BLOCK, num_columns)
    flat_scales = check_tensor("scales", scales.flatten(0, -2), shape, (torch.uint8,))
    check_multiple("codes: last dimension", num_columns, MX_BLOCK)
    out = torch.empty(flat_codes.shape, dtype=dtype, device=codes.device)
    if out.numel():
        backend_for(out, backend).mxfp8_dequantize(Mxfp8(flat_codes, flat_scales), out)
    return out.view(codes.shape)


def _matrix(x: torch.Tensor, *, columns: bool = False) -> torch.Tensor:
    """Check a tensor and flatten it to [M, K]."""
    if x.dim() < 2:
        raise KernelArgumentError(f"x: expected two or more dimensions, got {list(x.shape)}")
    check_multiple("x: last dimension", x.shape[-1], MX_BLOCK)
    if columns:
        check_multiple("x: last dimension but one", x.shape[-2], MX_BLOCK)
    return check_tensor("x", x.flatten(0, -2), (None, None), FLOATS)


def _empty(flat: torch.Tensor, *, by_rows: bool) -> Mxfp8:
    num_rows, num_columns = flat.shape
    shape = (num_rows, num_columns // MX_BLOCK) if by_rows else (num_rows // MX_BLOCK, num_columns)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    return Mxfp8(codes, torch.empty(shape, dtype=torch.uint8, device=flat.device))


def _shaped(x: torch.Tensor, flat: Mxfp8, *, by_rows: bool) -> Mxfp8:
    *lead, num_rows, num_columns = x.shape
    shape = (num_rows, num_columns // MX_BLOCK) if by_rows else (num_rows // MX_BLOCK, num_columns)
    return Mxfp8(flat.codes.view(x.shape), flat.scales.view(*lead, *shape))
