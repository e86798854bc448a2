"""MXFP8 and NVFP4 blocks, by the rules of `formats.py`."""

import numpy as np

from penstock.kernels.reference import formats

MX_BLOCK = 32
NV_BLOCK = 16
_NV_RANGE = formats.E4M3_MAX * formats.E2M1_MAX
Codes = tuple[np.ndarray, np.ndarray]


def mxfp8_rows(x: np.ndarray) -> Codes:
    """Quantize 1x32 blocks: float32 [M, K] -> codes [M, K], scales [M, K/32], uint8."""
    num_rows, num_columns = x.shape
    blocks = np.ascontiguousarray(x).reshape(num_rows, -1, MX_BLOCK)
    scales = formats.e8m0_scale(formats.abs_bits(blocks).max(-1))
    with np.errstate(all="ignore"):
        codes = formats.e4m3_encode(blocks * formats.e8m0_inverse(scales)[..., None])
    return codes.reshape(num_rows, num_columns), scales


def mxfp8_columns(x: np.ndarray) -> Codes:
    """Quantize 32x1 blocks: float32 [M, K] -> codes [M, K], scales [M/32, K], uint8."""
    codes, scales = mxfp8_rows(np.ascontiguousarray(x.T))
    return np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)


def mxfp8_dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Invert `mxfp8_rows` or `mxfp8_columns`, by the scales' shape -> float32 [M, K]."""
    is_rows = scales.shape[0] == codes.shape[0]
    factors = np.repeat(formats.e8m0_value(scales), MX_BLOCK, axis=1 if is_rows else 0)
    with np.errstate(all="ignore"):
        return formats.e4m3_decode(codes) * factors


def nvfp4_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize 1x16 blocks under one float32 scale per row (token), so rows stay independent.

    The token's scale is amax / 2688; a block's is amax / 6 over the token's, in E4M3; an element is
    divided by the product of the two. All divisions are IEEE float32. A row with an infinity or a
    NaN gets scale NaN, and is NaN as a whole.

    Returns:
        Codes uint8 [M, K/2] (even columns in the low four bits), block scales uint8 [M, K/16],
        token scales float32 [M].

    """
    num_rows = x.shape[0]
    blocks = np.ascontiguousarray(x).reshape(num_rows, -1, NV_BLOCK)
    block_amax = np.abs(blocks).max(-1)
    with np.errstate(all="ignore"):
        token_scales = block_amax.max(-1) / _NV_RANGE
        token_scales[~np.isfinite(block_amax.max(-1))] = np.nan
        divisor = np.where(token_scales == 0, np.float32(1.0), token_scales)[:, None]
        block_scales = formats.e4m3_encode(block_amax / formats.E2M1_MAX / divisor)
        factors = formats.e4m3_decode(block_scales) * divisor
        scaled = np.where(
            factors[..., None] == 0, np.copysign(0, blocks), blocks / factors[..., None]
        )
    codes = formats.e2m1_encode(scaled.astype(np.float32)).reshape(num_rows, -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, block_scales, token_scales


def nvfp4_dequantize(
    codes: np.ndarray, block_scales: np.ndarray, token_scales: np.ndarray
) -> np.ndarray:
    """Invert `nvfp4_rows` -> float32 [M, K]."""
    elements = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1, NV_BLOCK)
    factors = formats.e4m3_decode(block_scales) * token_scales[:, None]
    return (formats.e2m1_decode(elements) * factors[..., None]).reshape(codes.shape[0], -1)
