"""Deltas between checkpoint files: what comes out is what went in, byte for byte."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.infra.cli import main
from penstock.infra.weights.files.checkpoint import CheckpointFiles
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.kernels.digest import tensor_digest

LAYERS = 3


def weights(*arguments):
    return main(["weights", *map(str, arguments), "--threads", "2"])


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def state():
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i}.{kind}.weight" for i in range(LAYERS) for kind in ("up", "down")]
    return {name: rng.standard_normal((40, 30)).astype(np.float16) for name in names}


def moved(state, seed=1):
    rng = np.random.default_rng(seed)
    return {n: a + (rng.random(a.shape) < 0.05) * np.float16(0.002) for n, a in state.items()}


@pytest.fixture
def pair(tmp_path, state):
    base, target = tmp_path / "base.safetensors", tmp_path / "next.safetensors"
    save_file(state, base, {"step": "1"})
    save_file(moved(state), target, {"step": "2"})
    return base, target


def assert_rebuilt(base, target, tmp_path):
    delta, out = tmp_path / "d", tmp_path / "out"
    assert weights("diff", base, target, "-o", delta) == 0
    assert weights("apply", base, delta, "-o", out) == 0
    if target.is_dir():
        expected = {p.relative_to(target) for p in target.rglob("*") if p.is_file()}
        assert {p.relative_to(out) for p in out.rglob("*") if p.is_file()} == expected
        for path in expected:
            assert (out / path).read_bytes() == (target / path).read_bytes()
    else:
        assert out.read_bytes() == target.read_bytes()
    assert not list(tmp_path.glob(".*"))
    return delta


def test_a_file_is_rebuilt_with_its_metadata(pair, tmp_path):
    delta = assert_rebuilt(*pair, tmp_path)
    assert delta.stat().st_size < pair[1].stat().st_size / 3


def test_every_fate_of_a_tensor(tmp_path, state, capsys):
    target = moved(state)
    names = list(state)
    target[names[0]] = state[names[0]]
    target[names[1]] = target[names[1]].reshape(30, 40)
    target[names[2]] = target[names[2]].astype(np.float32)
    target[names[3]] = target[names[3]][:7]
    del target[names[4]]
    target["new"] = np.arange(11, dtype=np.int64)
    target["empty"] = np.zeros((0, 4), np.float32)
    target["scalar"] = np.array(np.nan, np.float64)
    save_file(state, tmp_path / "a")
    save_file(target, tmp_path / "b")
    delta = assert_rebuilt(tmp_path / "a", tmp_path / "b", tmp_path)
    capsys.readouterr()
    assert weights("inspect", delta, "--json") == 0
    statuses = {row["name"]: row["status"] for row in last_json(capsys)["tensors"]}
    assert statuses == {
        **dict(zip(names, ["equal", "reshaped", "replaced", "replaced", "removed"], strict=False)),
        names[5]: "changed", "new": "added", "empty": "added", "scalar": "added",
    }  # fmt: skip


def test_classes_of_exponents_are_told_apart_by_dtype(tmp_path, capsys):
    """A small element moves, a large one does not: in half and in full precision."""
    rng = np.random.default_rng(5)
    full = rng.standard_normal(60_000).astype(np.float32)
    for path, step in (("a", 0.0), ("b", 3e-8)):
        save_file(
            {"full": full + np.float32(step), "half": (full + np.float32(2e4 * step)).astype("f2")},
            tmp_path / path,
        )
    delta = tmp_path / "delta"
    assert weights("diff", tmp_path / "a", tmp_path / "b", "-o", delta) == 0
    capsys.readouterr()
    assert weights("inspect", delta, "--json") == 0
    found = last_json(capsys)
    changed = {row["dtype"]: row["share"]["num_changed"] for row in found["tensors"]}
    assert {d: sum(n.values()) for d, n in found["exponent_classes"].items()} == changed
    assert changed.keys() == {"F16", "F32"}
    assert weights("inspect", delta, "--plot", tmp_path / "plot.svg") == 0
    shown = capsys.readouterr().out
    assert all(f"class of base exponents from, {dtype}" in shown for dtype in changed)
    assert "F16" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.uint64, np.float32, np.float64]
)
def test_every_dtype_and_odd_values(dtype, tmp_path):
    rng = np.random.default_rng(3)
    base = rng.integers(0, 2, 5000 * np.dtype(dtype).itemsize, np.uint8)
    target = base.copy()
    target[::97] ^= 1
    target[:64] = 1 if dtype is np.bool_ else 0xFF
    save_file({"w": base.view(dtype)}, tmp_path / "a")
    save_file({"w": target.view(dtype)}, tmp_path / "b")
    assert_rebuilt(tmp_path / "a", tmp_path / "b", tmp_path)


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "BF16", "F4", "F6_E2M3"])
def test_dtypes_that_numpy_lacks(name, tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 4800, np.uint8)
    num_elements = 4800 * 8 // {"F8_E4M3": 8, "F8_E5M2": 8, "BF16": 16, "F4": 4, "F6_E2M3": 6}[name]
    for path in ("a", "b"):
        head = json.dumps(
            {"w": {"dtype": name, "shape": [num_elements], "data_offsets": [0, 4800]}}
        )
        (tmp_path / path).write_bytes(
            len(head).to_bytes(8, "little") + head.encode() + data.tobytes()
        )
        data[::101] ^= 1
    assert_rebuilt(tmp_path / "a", tmp_path / "b", tmp_path)


def sharded(folder, state, num_shards):
    (folder / "sub").mkdir(parents=True)
    names = sorted(state)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        own = names[shard::num_shards]
        save_file({name: state[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"shards": num_shards}))
    (folder / "sub" / "tokenizer.json").write_bytes(b"{}" * 500)
    (folder / "empty.txt").touch()
    return folder


def test_a_sharded_folder_is_rebuilt_even_when_it_is_cut_anew(tmp_path, state):
    base = sharded(tmp_path / "a", state, 2)
    target = sharded(tmp_path / "b", moved(state), 3)
    delta = assert_rebuilt(base, target, tmp_path)
    assert weights("verify", tmp_path / "out", delta) == 0
    with DeltaFile(delta) as patch:
        rows = [row for row in patch.manifest.target if row.name.startswith("model.layers")]
    assert 0 < sum(row.num_changed for row in rows) < 0.1 * sum(row.num_words for row in rows)


def test_links_are_followed_and_hidden_files_left_out(tmp_path, pair):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(pair[1])
    (folder / ".lock").touch()
    assert weights("diff", pair[0], folder, "-o", tmp_path / "d") == 0
    assert weights("apply", pair[0], tmp_path / "d", "-o", tmp_path / "out") == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == pair[1].read_bytes()


def test_a_merged_delta_leads_where_its_deltas_lead_and_is_smaller(tmp_path, state, capsys):
    states = [state]
    for seed in range(6):
        states.append(moved(states[-1], seed))
    for number, each in enumerate(states):
        save_file(each, tmp_path / f"{number}.safetensors")
    paths = [tmp_path / f"{number}.safetensors" for number in range(len(states))]
    deltas = [tmp_path / f"{number}.delta" for number in range(6)]
    for base, target, delta in zip(paths, paths[1:], deltas, strict=False):
        assert weights("diff", base, target, "-o", delta) == 0
    assert weights("merge", paths[0], *deltas, "-o", tmp_path / "merged") == 0
    assert weights("apply", paths[0], tmp_path / "merged", "-o", tmp_path / "out") == 0
    assert (tmp_path / "out").read_bytes() == paths[-1].read_bytes()
    assert (tmp_path / "merged").stat().st_size < sum(path.stat().st_size for path in deltas)
    assert weights("merge", paths[0], deltas[0], deltas[2], "-o", tmp_path / "gap") == 2
    assert "does not follow" in capsys.readouterr().err
    assert weights("merge", *deltas, "-o", tmp_path / "gap") == 2
    assert "expected BASE" in capsys.readouterr().err
    assert not (tmp_path / "gap").exists()


def test_verify_tells_base_target_and_neither(pair, tmp_path, capsys):
    delta = assert_rebuilt(*pair, tmp_path)
    other = load_file(pair[0])
    name = next(iter(other))
    other[name][3, 3] += 1
    save_file(other, tmp_path / "other", {"step": "1"})
    capsys.readouterr()
    verdicts = []
    for path in (*pair, tmp_path / "other"):
        code = weights("verify", path, delta, "--json")
        verdict = last_json(capsys)
        verdicts.append((code, verdict["is_base"], verdict["is_target"]))
    assert verdicts == [(0, True, False), (0, False, True), (1, False, False)]
    assert verdict["differs_from_base"] == [name]


def test_digests_are_those_of_the_kernels(pair):
    state = load_file(pair[0])
    with CheckpointFiles(pair[0]) as checkpoint:
        for key, tensor in checkpoint.tensors.items():
            if not key[0]:
                hasher = tensor.hasher()
                hasher.update(checkpoint.read(key, 0, tensor.num_words))
                expected = tensor_digest(state[tensor.name])
                assert int.from_bytes(hasher.digest(), "big") == expected


def test_an_output_over_its_own_base_is_replaced_at_the_end(pair, tmp_path):
    assert weights("diff", *pair, "-o", tmp_path / "d") == 0
    expected = pair[1].read_bytes()
    assert weights("apply", pair[0], tmp_path / "d", "-o", pair[0]) == 0
    assert pair[0].read_bytes() == expected
