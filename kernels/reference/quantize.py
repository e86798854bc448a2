"""Reference quantization to MXFP8 and NVFP4: the rounding rules that all implementations follow.

- E8M0 (scales of MXFP8): code e means 2**(e - 127), and 255 is NaN. The scale of a block is
  amax / 448, an IEEE float32 division, rounded *up* to a power of two (RCEIL), with a code of at
  most 254. A block with a NaN has scale 255 and NaN codes. amax is not clamped, so a block of zeros
  has scale code 0.
- E4M3 (elements of MXFP8, scales of NVFP4): rounded to nearest even and saturating at 448, also
  for infinity; the NaN code is 0x7F.
- E2M1 (elements of NVFP4): rounded to nearest even and saturating at 6.

Sources: OCP Microscaling Formats 1.0; arXiv 2506.08027 for rounding the scale up.
"""

import numpy as np

E4M3_MAX = np.float32(448.0)
E4M3_NAN = 0x7F
E2M1_MAX = np.float32(6.0)
E8M0_NAN = 255
E8M0_MAX = 254
_ABS = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


def abs_bits(x: np.ndarray) -> np.ndarray:
    """Return the bits of float32 without the sign, as uint32; NaNs are above 0x7F800000."""
    return x.view(np.uint32) & _ABS


def e8m0_scale(amax_bits: np.ndarray) -> np.ndarray:
    """Return the scale codes uint8 of blocks, given the largest `abs_bits` of each."""
    # In integers: the exponent, plus one if any bit below it is set (or, for subnormals, if the
    # value is above 2**-127).
    with np.errstate(all="ignore"):
        bits = (amax_bits.view(np.float32) / E4M3_MAX).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    is_above = np.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = np.minimum(exponent + is_above, E8M0_MAX)
    return np.where(amax_bits > _INFINITY, E8M0_NAN, code).astype(np.uint8)


def e8m0_value(codes: np.ndarray) -> np.ndarray:
    """Return 2**(code - 127) as float32, NaN for 255."""
    bits = codes.astype(np.uint32) << 23
    bits = np.where(codes == 0, np.uint32(0x00400000), bits)
    return np.where(codes == E8M0_NAN, np.uint32(0x7FC00000), bits).view(np.float32)


def e8m0_inverse(codes: np.ndarray) -> np.ndarray:
    """Return 2**(127 - code) as float32, NaN for 255."""
    return e8m0_value(np.where(codes == E8M0_NAN, codes, 254 - codes).astype(np.uint8))


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """Round float32 to E4M3 codes uint8, saturating."""
    bits = abs_bits(x)
    sign = ((x.view(np.uint32) >> 24) & 0x80).astype(np.uint8)
    clamped = np.minimum(bits, E4M3_MAX.view(np.uint32))
    # Round to nearest even by adding half a unit, less one if the last kept bit is even; then
    # move the exponent from float32's bias to that of E4M3.
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
    with np.errstate(all="ignore"):
        subnormal = np.rint(clamped.view(np.float32) * np.float32(512.0)).astype(np.uint32)
    code = np.where(clamped < (121 << 23), subnormal, normal).astype(np.uint8) | sign
    return np.where(bits > _INFINITY, E4M3_NAN, code).astype(np.uint8)


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """Return the float32 value of each E4M3 code."""
    return _E4M3_VALUES[codes]


def e2m1_encode(x: np.ndarray) -> np.ndarray:
    """Round float32 to E2M1 codes uint8 (0..15), saturating; NaN becomes 0."""
    size = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for bound, is_tie_up in zip(_E2M1_BOUNDS, _E2M1_TIES_UP, strict=True):
        code += (size >= bound) if is_tie_up else (size > bound)
    sign = ((x.view(np.uint32) >> 28) & 8).astype(np.uint8)
    return np.where(np.isnan(x), 0, code | sign).astype(np.uint8)


def e2m1_decode(codes: np.ndarray) -> np.ndarray:
    """Return the float32 value of each E2M1 code."""
    return _E2M1_VALUES[codes]


def _e4m3_values() -> np.ndarray:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    values[E4M3_NAN] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
_E2M1_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = np.array([*_E2M1_POSITIVE, *(-v for v in _E2M1_POSITIVE)], np.float32)
# Midpoints between neighboring values; ties go to the even code.
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_TIES_UP = (False, True, False, True, False, True, False)


MX_BLOCK = 32
NV_BLOCK = 16
_NV_RANGE = E4M3_MAX * E2M1_MAX
Codes = tuple[np.ndarray, np.ndarray]


def mxfp8_rows(x: np.ndarray) -> Codes:
    """Quantize 1x32 blocks: float32 [M, K] -> codes [M, K], scales [M, K/32], uint8."""
    num_rows, num_columns = x.shape
    blocks = np.ascontiguousarray(x).reshape(num_rows, -1, MX_BLOCK)
    scales = e8m0_scale(abs_bits(blocks).max(-1))
    with np.errstate(all="ignore"):
        codes = e4m3_encode(blocks * e8m0_inverse(scales)[..., None])
    return codes.reshape(num_rows, num_columns), scales


def mxfp8_dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Invert `mxfp8_rows` -> float32 [M, K]."""
    factors = np.repeat(e8m0_value(scales), MX_BLOCK, axis=1)
    with np.errstate(all="ignore"):
        return e4m3_decode(codes) * factors


def nvfp4_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize 1x16 blocks, with one float32 scale per row (token) so that rows are independent.

    The scale of a token is its amax / 2688. The scale of a block is its amax / 6 divided by the
    token's scale, in E4M3. Elements are divided by the product of both. All divisions are IEEE
    float32. A row with an infinity or NaN gets scale NaN, and all its values are NaN.

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
        # A row of zeros would be divided by zero.
        divisor = np.where(token_scales == 0, np.float32(1.0), token_scales)[:, None]
        block_scales = e4m3_encode(block_amax / E2M1_MAX / divisor)
        factors = e4m3_decode(block_scales) * divisor
        scaled = np.where(
            factors[..., None] == 0, np.copysign(0, blocks), blocks / factors[..., None]
        )
    codes = e2m1_encode(scaled.astype(np.float32)).reshape(num_rows, -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, block_scales, token_scales


def nvfp4_dequantize(
    codes: np.ndarray, block_scales: np.ndarray, token_scales: np.ndarray
) -> np.ndarray:
    """Invert `nvfp4_rows` -> float32 [M, K]."""
    elements = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1, NV_BLOCK)
    factors = e4m3_decode(block_scales) * token_scales[:, None]
    return (e2m1_decode(elements) * factors[..., None]).reshape(codes.shape[0], -1)
