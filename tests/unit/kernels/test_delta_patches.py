"""What lies around the codecs: patches, threads, odd shapes and kinds."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from penstock.kernels import delta
from penstock.kernels.delta import Codec, Dtype
from penstock.kernels.delta.dtypes import unpack_nibbles
from penstock.messages.errors import CorruptDataError


def steps(seed, count=4000, dtype=np.uint16):
    """A chain of four versions, each a few units from the one before."""
    rng = np.random.default_rng(seed)
    versions = [rng.integers(0, 1 << 8, count).astype(dtype)]
    for _ in range(3):
        moves = np.where(rng.random(count) < 0.1, rng.integers(1, 4, count), 0)
        versions.append(versions[-1] + moves.astype(dtype))
    return versions


def test_threads_do_not_share_the_memory_they_work_in():
    pairs = [(*steps(seed, 60_000)[:2], Dtype.BF16) for seed in range(8)]
    alone = [delta.encode(*pair) for pair in pairs]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda pair: delta.encode(*pair), pairs)) == alone
        patches = list(pool.map(lambda n: delta.decode(pairs[n][0], alone[n]), range(8)))
    for patch, (base, target, _) in zip(patches, pairs, strict=True):
        np.testing.assert_array_equal(patch.values, target[base != target])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (5, 7)])
def test_any_shape_comes_back(shape):
    base = np.full(shape, 0x3F80, np.uint16)
    payload = delta.encode(base, base + np.uint16(1))
    np.testing.assert_array_equal(delta.apply(base, payload), base + np.uint16(1))


@pytest.mark.parametrize("codec", [c for c in Codec if c is not Codec.EQUAL])
def test_a_target_goes_where_it_is_wanted(codec):
    """Also over what is left there from before, and from memory that a thread used before."""
    base, target, *_ = steps(5)
    out = np.full_like(base, 7)
    for old, new in ((base, target), (base, base + np.uint16(1)), (base, target)):
        assert delta.apply(old, delta.encode_with(codec, old, new), out) is out
        np.testing.assert_array_equal(out, new)


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        (Codec.GAP_ULP, Dtype.BF16),
        (Codec.CLASS_GAP_ULP, Dtype.FP8_E4M3),
        (Codec.GAP_ULP, Dtype.INT4X2),
        (Codec.XOR_ZSTD, Dtype.BF16),
    ],
)
def test_arrays_of_several_chunks_are_checked_whole(codec, kind):
    base = np.random.default_rng(0).integers(0, 256, 600_002, np.uint8).view(kind.storage)
    target = base.copy()
    target[:: base.size - 1] ^= base.dtype.type(1)
    payload = delta.encode_with(codec, base, target, kind)
    header = delta.read_header(payload)
    checks = [xxhash.xxh3_64_intdigest(array.data) for array in (base, target)]
    assert [header.base_check, header.target_check] == checks
    np.testing.assert_array_equal(delta.apply(base, payload), target)
    for place in (1, base.size - 2):
        other = base.copy()
        other[place] ^= base.dtype.type(1)
        with pytest.raises(CorruptDataError, match="another base"):
            delta.apply(other, payload)


def test_memory_that_cannot_hold_the_target_is_refused():
    base = np.zeros(8, np.uint16)
    payload = delta.encode(base, base)
    for out in (np.zeros(9, np.uint16), np.zeros(8, np.int16), np.zeros(16, np.uint16)[::2], base):
        with pytest.raises(ValueError, match="out: expected"):
            delta.apply(base, payload, out)
    assert not delta.apply(base, payload, np.ones(8, np.uint16)).any()


def test_half_bytes_go_better_as_elements_of_four_bits():
    rng = np.random.default_rng(3)
    halves = rng.integers(1, 15, 1 << 15).astype(np.uint8)
    moved = halves + (rng.random(halves.size) < 0.02).astype(np.uint8)
    base, target = (h[::2] | h[1::2] << 4 for h in (halves, moved))
    payload = delta.encode(base, target, Dtype.INT4X2)
    np.testing.assert_array_equal(delta.apply(base, payload), target)
    np.testing.assert_array_equal(unpack_nibbles(target), moved)
    assert len(payload) < 0.96 * len(delta.encode(base, target, Dtype.INT8))


def test_dense_changes_of_high_precision_leave_the_step_codecs_or_beat_raw():
    rng = np.random.default_rng(4)
    base = (rng.standard_normal(1 << 14) * 0.02).astype(np.float32)
    target = base + np.float32(3e-6) * rng.standard_normal(base.size).astype(np.float32)
    bits = base.view(np.uint32), target.view(np.uint32)
    payload = delta.encode(*bits)
    np.testing.assert_array_equal(delta.apply(bits[0], payload), bits[1])
    assert len(payload) < 0.7 * len(delta.encode_with(Codec.RAW, *bits))


def test_eight_byte_elements_and_strided_or_signed_arrays():
    base, target = np.arange(100, dtype=np.uint64), np.arange(100, dtype=np.uint64) * 3
    for dtype in (None, Dtype.INT64, Dtype.FP64):
        np.testing.assert_array_equal(delta.apply(base, delta.encode(base, target, dtype)), target)
    for bad in (np.zeros(8, np.uint16)[::2], np.zeros(4, np.float32), np.zeros(4, np.int16)):
        with pytest.raises(ValueError, match="expected"):
            delta.encode(bad, bad)
    with pytest.raises(ValueError, match="does not support"):
        delta.encode_with(Codec.GAP_ULP, base, target)
