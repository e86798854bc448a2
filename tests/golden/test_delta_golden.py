"""Payloads written by the first version of the format decode forever.

`tests/golden/delta/<KIND>-<CODEC>.msgpack` holds a base, a target and the payload between them. A
file is never changed: a new layout gets a new version number and files of its own. The payloads of
a new kind or codec are added by hand, with `write(case)`.
"""

from pathlib import Path

import msgpack
import numpy as np
import pytest
from tests.golden.delta_reader import read_changes

from penstock.kernels import delta
from penstock.kernels.delta import Codec, Dtype
from penstock.kernels.delta.dtypes import unpack_nibbles

FOLDER = Path(__file__).with_name("delta")
CASES = sorted(path.stem for path in FOLDER.glob("*.msgpack"))


def write(case):
    """Make the file of `KIND-CODEC`, from small steps and the odd patterns of its kind."""
    kind, codec = Dtype[case.split("-")[0]], Codec[case.split("-")[1]]
    rng = np.random.default_rng(len(case))
    base = rng.integers(0, 256, 700 * kind.traits.itemsize, np.uint8).view(kind.storage)
    target = base + np.where(rng.random(700) < 0.2, rng.integers(0, 3, 700), 0).astype(base.dtype)
    target[::97] = ~base[::97]
    target = base.copy() if codec is Codec.EQUAL else target
    payload = delta.encode_with(codec, base, target, kind)
    case_file = {"base": base.tobytes(), "target": target.tobytes(), "payload": payload}
    (FOLDER / f"{case}.msgpack").write_bytes(msgpack.packb(case_file))


@pytest.mark.parametrize("case", CASES)
def test_a_payload_of_the_first_version_still_decodes(case):
    kind, codec = Dtype[case.split("-")[0]], Codec[case.split("-")[1]]
    stored = msgpack.unpackb((FOLDER / f"{case}.msgpack").read_bytes())
    base, target = (np.frombuffer(stored[name], kind.storage) for name in ("base", "target"))
    header = delta.read_header(stored["payload"])
    assert (header.codec, header.dtype) == (codec, kind)
    np.testing.assert_array_equal(delta.apply(base, stored["payload"]), target)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_reader_agrees(case):
    kind = Dtype[case.split("-")[0]]
    stored = msgpack.unpackb((FOLDER / f"{case}.msgpack").read_bytes())
    old, new = (np.frombuffer(stored[name], kind.storage) for name in ("base", "target"))
    if kind is Dtype.INT4X2:
        old, new = unpack_nibbles(old), unpack_nibbles(new)
    where = np.flatnonzero(old != new)
    expected = dict(zip(where.tolist(), new[where].tolist(), strict=True))
    assert read_changes(old.tolist(), stored["payload"]) == expected


def test_every_codec_and_kind_has_a_golden_payload():
    kinds, codecs = ({case.split("-")[i] for case in CASES} for i in (0, 1))
    assert kinds == set(Dtype.__members__)
    assert codecs == set(Codec.__members__)
    assert len(CASES) >= len(kinds)
