"""The compiled coding of steps and its numpy twin: the same bytes, and each reads the other's."""

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from penstock.kernels import delta
from penstock.kernels.delta import Codec, Dtype, compiled, portable
from penstock.kernels.delta.header import Header

CALM = settings(deadline=None, max_examples=40)
STEPPED = [dtype for dtype in Dtype if dtype.traits.has_steps]


@pytest.fixture(autouse=True, scope="module")
def needs_a_compiler():
    if compiled.load_delta_library() is None:
        pytest.skip("no C compiler: there is one path only")


@st.composite
def jobs(draw):
    """A header to encode under, thresholds, and two arrays of elements."""
    dtype = draw(st.sampled_from(STEPPED))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    high = 1 << dtype.traits.bits
    count = draw(st.sampled_from([0, 1, 63, 64, 65, 511, 512, 513, 3000]))
    base = rng.integers(0, high, count).astype(dtype.storage)
    spread = draw(st.sampled_from([1, 3, 200, high]))
    moved = (base.astype(np.int64) + rng.integers(-spread, spread + 1, count)) % high
    density = draw(st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]))
    target = np.where(rng.random(count) < density, moved, base).astype(dtype.storage)
    keys = draw(st.sets(st.integers(0, dtype.traits.num_keys - 1), max_size=15)) | {0}
    codec = draw(st.sampled_from([Codec.CLASS_GAP_ULP, Codec.GAP_ULP, Codec.BITMASK_ULP]))
    thresholds = sorted(keys) if codec is Codec.CLASS_GAP_ULP else [0]
    header = Header(
        codec=codec, dtype=dtype, num_elements=count, num_changed=0, base_check=0, target_check=0
    )
    return header, thresholds, base, target


@CALM
@given(jobs())
def test_both_paths_write_the_same_and_read_each_other(job):
    header, thresholds, base, target = job
    whole, body = compiled.encode_steps(header, thresholds, base, target)
    assert (whole, body) == portable.encode_steps(header, thresholds, base, target)
    assert whole.plain_bytes <= whole.plain_bytes_max
    where = np.flatnonzero(base != target)
    for path in (compiled, portable):
        places, values = path.decode_steps(whole, base, body)
        np.testing.assert_array_equal(places, where)
        np.testing.assert_array_equal(values, target[where])
    made = np.full_like(base, 255)
    compiled.apply_steps(whole, base, body, made)
    np.testing.assert_array_equal(made, target)
    counts = compiled.tally(base, target, header.dtype)
    np.testing.assert_array_equal(counts, portable.tally(base, target, header.dtype))


@CALM
@given(jobs(), st.data())
def test_both_paths_judge_damaged_bodies_alike(job, data):
    """Bits are flipped, and the lengths of the strings are moved, behind any checksum."""
    header, thresholds, base, target = job
    whole, body = compiled.encode_steps(header, thresholds, base, target)
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    unary = data.draw(st.integers(0, len(body)))
    whole = msgspec.structs.replace(
        whole, unary_bytes=data.draw(st.sampled_from([whole.unary_bytes, unary]))
    )
    found = [outcome(path, whole, base, bytes(damaged)) for path in (compiled, portable)]
    assert found[0] == found[1]
    made = base.copy()
    try:
        compiled.apply_steps(whole, base.copy(), bytes(damaged), made)
    except ValueError:
        assert found[0] == "refused"
    else:
        where = np.flatnonzero(made != base)
        assert found[0] == (where.tolist(), made[where].tolist())


def test_without_a_compiler_the_portable_path_does_it_all(monkeypatch):
    monkeypatch.setattr(compiled, "load_delta_library", lambda: None)
    base = np.arange(3000, dtype=np.uint16)
    target = base + (base % 7 == 0).astype(np.uint16)
    payload = delta.encode(base, target)
    np.testing.assert_array_equal(delta.apply(base, payload), target)
    np.testing.assert_array_equal(delta.decode(base, payload).values, target[base % 7 == 0])


def outcome(path, header, base, body):
    """Return what a path makes of a body; every place must lie inside the array."""
    try:
        places, values = path.decode_steps(header, base, body)
    except ValueError:
        return "refused"
    assert np.all((places >= 0) & (places < base.size))
    return places.tolist(), values.tolist()
