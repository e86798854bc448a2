"""Any pair of checkpoints comes back; no bytes crash the parsers."""

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from penstock.infra.weights.actions import apply_delta
from penstock.infra.weights.diff import write_delta
from penstock.infra.weights.files.checkpoint import CheckpointFiles, read_head
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.infra.weights.files.manifest import decode_manifest
from penstock.messages.errors import CorruptDataError

DTYPES = [np.uint8, np.int16, np.float16, np.float32, np.int64, np.bool_]


@st.composite
def states(draw):
    """Tensors under few names, so that two draws often share some."""
    state = {}
    for name in draw(st.sets(st.sampled_from(["a", "b", "c", "layers.0.w", "é"]), max_size=4)):
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        count = int(np.prod(shape, dtype=int))
        data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        if dtype == np.bool_:
            data = bytes(byte & 1 for byte in data)
        state[name] = np.frombuffer(data, dtype).reshape(shape)
    return state


@settings(max_examples=40, deadline=None)
@example({}, {"packed": np.array([16, 17], np.uint8)}, 1)  # more half bytes than words change
@given(states(), states(), st.integers(1, 3))
def test_any_pair_comes_back(before, after, num_threads):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a").write_bytes(save(before, {"x": "1"}))
        (folder / "b").write_bytes(save(after))
        with CheckpointFiles(folder / "a") as base, CheckpointFiles(folder / "b") as target:
            done = {"num_threads": num_threads, "advance": lambda _: None}
            write_delta(base, target, folder / "d", **done)
            with DeltaFile(folder / "d") as patch:
                apply_delta(base, patch, folder / "c", **done)
        assert (folder / "c").read_bytes() == (folder / "b").read_bytes()


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal(500).astype(np.float32), "v": np.zeros(3, np.int8)}
    (folder / "a").write_bytes(save(state))
    (folder / "b").write_bytes(save({"w": state["w"] * np.float32(1.0001), "u": state["v"]}))
    with CheckpointFiles(folder / "a") as base, CheckpointFiles(folder / "b") as target:
        write_delta(base, target, folder / "d", num_threads=1, advance=lambda _: None)
    return folder


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_damaged_delta_is_refused_and_leaves_nothing(sample, data):
    """Bytes are changed, cut or doubled: it is an error, or exactly the target."""
    whole = (sample / "d").read_bytes()
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(broken) - 1))
        broken[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    (sample / "broken").write_bytes(broken)
    with CheckpointFiles(sample / "a") as base:
        try:
            with DeltaFile(sample / "broken") as patch:
                apply_delta(base, patch, sample / "out", num_threads=1, advance=lambda _: None)
        except CorruptDataError:
            assert not (sample / "out").exists()
        else:
            assert bytes(broken) == whole
            (sample / "out").unlink()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_manifest_of_any_values_is_checked(sample, data):
    """One field anywhere becomes another value: it is refused, or still decodes to the same."""
    with DeltaFile(sample / "d") as patch:
        plain = msgspec.msgpack.encode(patch.manifest)
        payload_bytes = patch.manifest.offsets()[-1]
    tree = msgspec.msgpack.decode(plain)
    node = tree
    while isinstance(node, list | dict) and node:
        keys = range(len(node)) if isinstance(node, list) else sorted(node)
        key = data.draw(st.sampled_from(list(keys)))
        parent, node = node, node[key]
    parent[key] = data.draw(
        st.none() | st.integers(-1, 2**63) | st.text(max_size=4) | st.binary(max_size=40)
    )
    changed = msgspec.msgpack.encode(tree)
    try:
        decode_manifest(changed, payload_bytes)
    except CorruptDataError:
        assert changed != plain


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_as_a_safetensors_file(tmp_path_factory, data, has_length):
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(len(data).to_bytes(8, "little") * has_length + data)
    try:
        head_bytes, tensors = read_head(path)
    except CorruptDataError as error:
        assert str(path) in str(error)
    else:
        assert head_bytes + sum(t.num_bytes for t in tensors) == path.stat().st_size
