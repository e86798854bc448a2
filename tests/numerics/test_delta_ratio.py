"""The size of a delta against the entropy of what changed, on steps of a known kind."""

import numpy as np
import pytest
import zstandard
from tests.lab.bench.codecs.measure import entropy_bound_bytes

from penstock.kernels import delta
from penstock.kernels.delta import Codec

NUM_ELEMENTS = 1 << 20


def to_bf16(values):
    """Round float32 to bfloat16 bit patterns, to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.fixture(scope="module")
def masters():
    return (np.random.default_rng(0).standard_normal(NUM_ELEMENTS) * 0.02).astype(np.float32)


@pytest.mark.parametrize("step", [3e-7, 1e-6, 3e-6])
def test_size_is_near_the_bound_and_far_below_xor(masters, step):
    noise = np.random.default_rng(1).standard_normal(NUM_ELEMENTS).astype(np.float32)
    base, target = to_bf16(masters), to_bf16(masters + np.float32(step) * noise)
    payload = delta.encode(base, target)
    np.testing.assert_array_equal(delta.apply(base, payload), target)
    assert entropy_bound_bytes(base, target) / len(payload) >= 0.93
    xor = zstandard.ZstdCompressor(level=1).compress((base ^ target).data)
    assert len(payload) <= 0.40 * len(xor)
    assert len(payload) <= 0.85 * len(delta.encode_with(Codec.GAP_ULP, base, target))


def test_random_bits_cost_hardly_more_than_themselves():
    rng = np.random.default_rng(2)
    base, target = (rng.integers(0, 1 << 16, NUM_ELEMENTS, np.uint16) for _ in range(2))
    payload = delta.encode(base, target)
    np.testing.assert_array_equal(delta.apply(base, payload), target)
    assert len(payload) <= 1.001 * target.nbytes
    assert delta.read_header(payload).codec is Codec.RAW


def test_an_unchanged_array_costs_a_header():
    base = np.arange(NUM_ELEMENTS, dtype=np.uint32)
    payload = delta.encode(base, base.copy())
    assert len(payload) == 50
    assert delta.decode(base, payload).flat_indices.size == 0


def test_a_single_change_in_a_large_array_is_small():
    base = np.zeros(1 << 22, np.uint16)
    target = base.copy()
    target[3_999_999] = 0xFFFF
    payload = delta.encode(base, target)
    np.testing.assert_array_equal(delta.apply(base, payload), target)
    assert len(payload) < 200


def test_steps_over_zero_and_to_infinity_are_small_codes():
    base = np.array([0x0000, 0x8000, 0x7F7F, 0xFF7F] * 500, np.uint16)
    target = np.array([0x8000, 0x0000, 0x7F80, 0xFF80] * 500, np.uint16)
    payload = delta.encode_with(Codec.GAP_ULP, base, target)
    np.testing.assert_array_equal(delta.apply(base, payload), target)
    (record,) = delta.read_header(payload).classes
    assert record.large.num_coded == 0
