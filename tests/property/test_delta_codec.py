"""Any two arrays of bits go through every codec and come back, or are refused."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as nps
from tests.golden.delta_reader import read_changes

from penstock.kernels import delta
from penstock.kernels.delta import Codec, Dtype
from penstock.kernels.delta.dtypes import unpack_nibbles
from penstock.messages.errors import CorruptDataError

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x3F80, 0xBF7F]
"""bfloat16: zeros, infinities, quiet and signaling NaNs, subnormals, +-1."""
BITS = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF))
CALM = settings(deadline=None, max_examples=60)
KINDS = list(Dtype)


@st.composite
def pairs(draw, kinds=KINDS):
    """Two arrays that differ nowhere, here and there, or everywhere, and their kind."""
    kind = draw(st.sampled_from(kinds))
    elements = BITS if kind is Dtype.BF16 else None
    base = draw(nps.arrays(kind.storage, st.integers(0, 300), elements=elements))
    other = draw(nps.arrays(kind.storage, base.shape, elements=elements))
    density = draw(st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        other = base + rng.integers(0, 3, base.shape).astype(base.dtype)
    return base, np.where(rng.random(base.shape) < density, other, base), kind


def codecs_for(kind):
    """The codecs that can hold any change of a kind."""
    return [c for c in Codec if c is not Codec.EQUAL and (kind.traits.has_steps or not c.has_steps)]


def elements(array, kind):
    return unpack_nibbles(array).tolist() if kind is Dtype.INT4X2 else array.tolist()


def changes(base, target, kind):
    old, new = elements(base, kind), elements(target, kind)
    return {i: bits for i, bits in enumerate(new) if bits != old[i]}


@CALM
@given(pairs())
def test_the_ladder_is_lossless_and_applying_twice_is_harmless(pair):
    base, target, kind = pair
    payload = delta.encode(base, target, kind)
    np.testing.assert_array_equal(delta.apply(base, payload), target)
    patch = delta.decode(base, payload)
    np.testing.assert_array_equal(np.sort(patch.flat_indices), np.flatnonzero(base != target))
    twice = base.copy()
    for _ in range(2):
        twice[patch.flat_indices] = patch.values
    np.testing.assert_array_equal(twice, target)


@CALM
@given(pairs())
def test_each_codec_agrees_with_the_reference(pair):
    base, target, kind = pair
    for codec in codecs_for(kind):
        payload = delta.encode_with(codec, base, target, kind)
        assert read_changes(elements(base, kind), payload) == changes(base, target, kind)
        np.testing.assert_array_equal(delta.apply(base, payload), target)


@CALM
@given(pairs(), st.data())
def test_a_cut_or_flipped_payload_is_refused(pair, data):
    base, target, kind = pair
    payload = delta.encode(base, target, kind)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(CorruptDataError):
        delta.decode(base, payload[:cut])
    damaged = bytearray(payload)
    damaged[cut] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptDataError):
        delta.decode(base, bytes(damaged))


@CALM
@given(st.binary(max_size=300))
def test_foreign_bytes_are_refused(junk):
    for payload in (junk, b"PSDX\x01" + junk):
        with pytest.raises(CorruptDataError):
            delta.decode(np.zeros(8, np.uint16), payload)


@CALM
@given(pairs([Dtype.BF16]), st.data())
def test_a_forged_payload_gives_a_patch_inside_the_array_or_is_refused(pair, data):
    """With a valid checksum over damaged fields, as a hostile sender would make."""
    base, target, _ = pair
    payload = bytearray(delta.encode_with(Codec.CLASS_GAP_ULP, base, target)[:-8])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(4, len(payload) - 1))] = data.draw(st.integers(0, 255))
    forged = bytes(payload) + delta.checksum(payload)
    try:
        patch = delta.decode(base, forged)
    except CorruptDataError:
        return
    assert patch.flat_indices.shape == patch.values.shape
    assert np.all((patch.flat_indices >= 0) & (patch.flat_indices < base.size))


@CALM
@given(pairs([Dtype.BF16]))
def test_another_base_is_refused(pair):
    base, target, _ = pair
    other = base + np.uint16(1)
    for codec in (Codec.GAP_ULP, Codec.CLASS_GAP_ULP):
        payload = delta.encode_with(codec, base, target)
        if base.size:
            for read in (delta.decode, delta.apply):
                with pytest.raises(CorruptDataError, match=r"base_check: .* another base"):
                    read(other, payload)
        with pytest.raises(CorruptDataError, match="items"):
            delta.decode(np.append(base, base.dtype.type(0)), payload)
