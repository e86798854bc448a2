"""MXFP8 and NVFP4 codes against oracles written apart from the kernels: tables and a search."""

import numpy as np
import pytest
import torch

from penstock.kernels.reference import quantize
from penstock.kernels.reference.quantize import (
    mxfp8_dequantize,
    mxfp8_rows,
    nvfp4_dequantize,
    nvfp4_rows,
)

POSITIVE_E4M3 = [
    (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7)
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)
]


def finite_bf16():
    """Every finite bfloat16, as int16 patterns."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    return bits[bits.view(torch.bfloat16).isfinite()]


def nearest(values, table):
    """Codes of the nearest entries of an ascending table, ties to the even code; saturating."""
    table = np.array(table)
    middles = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(middles, values, side="left")
    is_tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == values)
    return below + (is_tie & (below % 2 == 1))


def oracle(x):
    """Codes and scales of float64 [M, K] in blocks of 32, finite."""
    blocks = x.reshape(x.shape[0], -1, 32)
    scales = np.zeros(blocks.shape[:2], np.uint8)
    amax = np.abs(blocks).max(-1)
    for code in range(254):
        scales[amax > 448.0 * 2.0 ** (code - 127)] = code + 1
    scaled = blocks / 2.0 ** (scales[..., None].astype(float) - 127)
    codes = nearest(np.abs(scaled), POSITIVE_E4M3) | np.where(np.signbit(blocks), 0x80, 0)
    return codes.astype(np.uint8).reshape(x.shape), scales


@pytest.mark.parametrize("arrangement", ["shuffled", "sorted"])
def test_every_finite_bfloat16_has_the_frozen_codes(arrangement):
    bits = finite_bf16()
    if arrangement == "shuffled":
        bits = bits[torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))]
    x = bits.view(torch.bfloat16).view(-1, 32)
    codes, scales = mxfp8_rows(x.float().numpy())
    expected_codes, expected_scales = oracle(x.double().numpy())
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)


def random_bits(seed, shape):
    """Any float32 patterns: a third of the blocks near each other, as weights are."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
    bits[::3] = bits[::3] & 0x00FFFFFF | 0x3B000000
    return bits.view(torch.float32)


def test_blocks_that_hold_no_ordinary_numbers():
    x = torch.ones(5, 32)
    x[0], x[1, 3], x[2, 3], x[3, 3], x[4] = 0.0, torch.nan, torch.inf, -torch.inf, -0.0
    codes, scales = mxfp8_rows(x.numpy())
    assert scales.flatten().tolist() == [0, 255, 254, 254, 0]
    assert (codes[1] == quantize.E4M3_NAN).all()
    assert codes[2, 3], codes[3, 3] == (0x7E, 0xFE)
    assert (codes[4] == 0x80).all()
    values = torch.from_numpy(mxfp8_dequantize(codes, scales))
    assert values[1].isnan().all()
    assert values[2, 3] == torch.inf
    assert values[3, 3] == -torch.inf


def test_dequantizing_is_exact_where_it_says():
    codes = torch.arange(256, dtype=torch.uint8).repeat(244, 1)
    scales = torch.arange(3, 247, dtype=torch.uint8).view(-1, 1).repeat(1, 8)
    values = torch.from_numpy(mxfp8_dequantize(codes.numpy(), scales.numpy())).double()
    table = torch.tensor([*POSITIVE_E4M3, torch.nan], dtype=torch.float64)
    exact = torch.cat([table, -table]) * 2.0 ** (scales[:, :1].double() - 127)
    torch.testing.assert_close(values, exact, rtol=0, atol=0, equal_nan=True)


def test_quantizing_again_changes_nothing():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    first = mxfp8_dequantize(*mxfp8_rows(x.numpy()))
    np.testing.assert_array_equal(mxfp8_dequantize(*mxfp8_rows(first)), first)


def test_nvfp4_rounds_to_the_nearest_of_its_values_and_keeps_tokens_apart():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    codes, block_scales, token_scales = nvfp4_rows(x.numpy())
    elements = np.stack([codes & 15, codes >> 4], -1).reshape(16, 64)
    factors = quantize.e4m3_decode(block_scales) * token_scales[:, None]
    scaled = (x.numpy() / np.repeat(factors, 16, axis=1)).astype(np.float64)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    np.testing.assert_array_equal(elements & 7, nearest(np.abs(scaled), table))
    np.testing.assert_array_equal(nvfp4_rows(x[5:6].numpy())[0][0], codes[5])
    louder = torch.cat([x, 1000 * x[:1]])
    np.testing.assert_array_equal(nvfp4_rows(louder.numpy())[0][:16], codes)


def test_nvfp4_of_zeros_and_of_what_is_not_finite():
    x = torch.zeros(3, 32)
    x[1, 4], x[2, 0] = torch.nan, 3.0
    values = torch.from_numpy(nvfp4_dequantize(*nvfp4_rows(x.numpy())))
    assert torch.equal(values[0], x[0])
    assert values[1].isnan().all()
    assert torch.equal(values[2], x[2])


def test_torchao_rounds_the_same_way():
    """To the byte; but what torchao leaves unscaled, blocks of scale 0, it rounds to zeros."""
    reason = "torchao is not installed: pip install torchao"
    formats_there = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=reason)
    rceil = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
    wide = random_bits(5, (1 << 15, 32))
    wide[0, 3], wide[1, 3], wide[2] = torch.nan, torch.inf, 0.0
    for x in (finite_bf16().view(torch.bfloat16).view(-1, 32), wide):
        scales, codes = formats_there.to_mx(x, torch.float8_e4m3fn, 32, rceil)
        scales, codes = scales.view(torch.uint8).view(-1, 1), codes.view(torch.uint8)
        own_codes, own_scales = map(torch.from_numpy, mxfp8_rows(x.float().numpy()))
        assert torch.equal(scales, own_scales)
        is_scaled = own_scales[:, 0] > 0
        assert torch.equal(codes[is_scaled], own_codes[is_scaled])
        tiny = 448.0 * 2.0**-127
        assert (x[~is_scaled].double().abs() <= tiny).all()
        assert (codes[~is_scaled] & 0x7F == 0).all()
        values = torch.from_numpy(mxfp8_dequantize(own_codes.numpy(), own_scales.numpy()))
        assert values[~is_scaled].isfinite().all()
