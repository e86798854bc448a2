"""Reference float32 arithmetic in NumPy: it fixes the order and rounding of every operation.

The CUDA kernels do the same operations in the same order, so both give the same bits:

- adding a product is one fused multiply-add; nothing else is fused;
- a sum over a row has 128 lanes: lane v starts from zero and adds elements v, 128 + v, 256 + v ...
  in this order; then lane v adds lane v + 64, v + 32, ..., v + 1. The order depends only on the
  length of the row;
- exp and log are polynomials of fused multiply-adds (coefficients from Cephes), accurate to about
  one ulp;
- division and square root are those of IEEE 754.
"""

import numpy as np
from numpy.typing import ArrayLike

NUM_LANES = 128
EXP_LOWEST = np.float32(-87.0)
"""Argument below which exp returns 0: such a term is less than 2**-125 of the largest."""

_LOG2_E = np.float32(1.44269504088896341)
# 1.5 * 2**23; adding it rounds to an integer.
_ROUND_MAGIC = np.float32(12582912.0)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
        1.6666665459e-1, 5.0000001201e-1)  # fmt: skip
_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
_SQRT_HALF = np.float32(0.70710678118654752)


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> np.ndarray:
    """Return a * b + c in float32, rounded once."""
    # NumPy has no fused multiply-add. The product of two float32 is exact in float64. The sum is
    # rounded to odd in float64 (the last bit says whether anything was lost), which makes the
    # rounding to float32 correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    # sums", 2008).
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        bits = total.view(np.int64)
        is_even_and_inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
        step = np.where((error > 0) == (total > 0), 1, -1)
        return np.where(is_even_and_inexact, bits + step, bits).view(np.float64).astype(np.float32)


def exp(x: np.ndarray) -> np.ndarray:
    """Return e**x for x <= 88; 0 below `EXP_LOWEST`, NaN for NaN."""
    # x = n ln 2 + r: a polynomial gives e**r, and the exponent bits give 2**n.
    with np.errstate(all="ignore"):
        shifted = fma(x, _LOG2_E, _ROUND_MAGIC)
        n = shifted - _ROUND_MAGIC
        r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
        p = np.full_like(r, _EXP[0])
        for coefficient in _EXP[1:]:
            p = fma(p, r, np.float32(coefficient))
        y = fma(p, r * r, r) + np.float32(1.0)
        power = (shifted.view(np.int32) - _ROUND_MAGIC.view(np.int32) + 127) << 23
        return np.where(x < EXP_LOWEST, np.float32(0.0), y * power.view(np.float32))


def log(x: np.ndarray) -> np.ndarray:
    """Return ln(x) for positive normal float32; NaN and infinity are returned as they are."""
    # x = 2**e * m with m from sqrt(1/2) to sqrt(2), which centers the polynomial at m = 1.
    with np.errstate(all="ignore"):
        bits = x.view(np.int32)
        exponent = (bits >> 23) - 126
        mantissa = ((bits & 0x7FFFFF) | 0x3F000000).view(np.float32)
        is_low = mantissa < _SQRT_HALF
        e = np.where(is_low, exponent - 1, exponent).astype(np.float32)
        m = np.where(is_low, mantissa + mantissa, mantissa) - np.float32(1.0)
        z = m * m
        p = np.full_like(m, _LOG[0])
        for coefficient in _LOG[1:]:
            p = fma(p, m, np.float32(coefficient))
        y = fma(e, LN2_LOW, p * m * z)
        y = fma(z, np.float32(-0.5), y)
        result = fma(e, LN2_HIGH, m + y)
        return np.where(np.isfinite(x), result, x)


def in_lanes(values: np.ndarray) -> np.ndarray:
    """Reshape [..., N] to [..., ceil(N/128), 128], padded with zeros."""
    count = values.shape[-1]
    rounds = -(-count // NUM_LANES)
    padded = np.zeros((*values.shape[:-1], rounds * NUM_LANES), np.float32)
    padded[..., :count] = values
    return padded.reshape(*values.shape[:-1], rounds, NUM_LANES)


def fold_lanes(lanes: np.ndarray) -> np.ndarray:
    """Sum [..., 128] by adding halves repeatedly -> [...]."""
    width = NUM_LANES // 2
    while width:
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
        width //= 2
    return lanes[..., 0]


def lane_sum(values: np.ndarray) -> np.ndarray:
    """Sum [..., N] over the last dimension in 128 lanes -> [...]."""
    cut = in_lanes(values)
    total = np.zeros((*cut.shape[:-2], NUM_LANES), np.float32)
    for i in range(cut.shape[-2]):
        total = total + cut[..., i, :]
    return fold_lanes(total)


def lane_dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sum a * b [..., N] over the last dimension in 128 lanes, with `fma` -> [...]."""
    left, right = in_lanes(a), in_lanes(b)
    shape = np.broadcast_shapes(left.shape, right.shape)
    total = np.zeros((*shape[:-2], NUM_LANES), np.float32)
    for i in range(shape[-2]):
        total = fma(left[..., i, :], right[..., i, :], total)
    return fold_lanes(total)
