"""The frozen rounding rules of the small number formats, in integer arithmetic.

- E8M0 (scales of MXFP8): code e is 2**(e - 127), 255 is NaN. A block's scale is amax / 448, an
  IEEE float32 division, rounded *up* to a power of two (RCEIL), at most 254. A block with a NaN has
  scale 255 and NaN codes; amax is not clamped, so a block of zeros has scale 0.
- E4M3 (elements of MXFP8, scales of NVFP4): round to nearest even; what is beyond 448, infinity
  too, becomes 448; the NaN code is 0x7F.
- E2M1 (elements of NVFP4): round to nearest even, beyond 6 becomes 6.

Sources: OCP Microscaling Formats 1.0; arXiv 2506.08027 on why the scale is rounded up.
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
    """Return float32 without the sign as uint32; NaNs are above 0x7F800000."""
    return x.view(np.uint32) & _ABS


def e8m0_scale(amax_bits: np.ndarray) -> np.ndarray:
    """Return the scale codes uint8 of blocks whose largest `abs_bits` are given."""
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
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbors; a tie goes to the even code."""
_E2M1_TIES_UP = (False, True, False, True, False, True, False)
