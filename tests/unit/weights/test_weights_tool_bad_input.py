"""Damaged, foreign and hostile input: a clear error, and nothing written."""

import json
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from safetensors.numpy import save_file

from penstock.infra.cli import main
from penstock.infra.weights.files.delta_file import END_MAGIC, MAGIC, DeltaFile


def weights(*arguments):
    return main(["weights", *map(str, arguments), "--threads", "1"])


@pytest.fixture
def paths(tmp_path):
    rng = np.random.default_rng(0)
    state = {name: rng.standard_normal(3000).astype(np.float32) for name in "xyz"}
    save_file(state, tmp_path / "base")
    save_file({n: a * np.float32(1.001) for n, a in state.items()}, tmp_path / "next")
    assert weights("diff", tmp_path / "base", tmp_path / "next", "-o", tmp_path / "delta") == 0
    return tmp_path


def refuses(paths, capsys, word):
    capsys.readouterr()
    before = sorted(paths.iterdir())
    assert weights("apply", paths / "base", paths / "delta", "-o", paths / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: ") and word in error and error.count("\n") == 1
    assert sorted(paths.iterdir()) == before


@pytest.mark.parametrize("keep", [0, 7, 8, 70, 0.5, -1])
def test_a_truncated_delta(paths, capsys, keep):
    data = (paths / "delta").read_bytes()
    cut = int(len(data) * keep) if isinstance(keep, float) else keep
    (paths / "delta").write_bytes(data[:cut])
    refuses(paths, capsys, "delta")


@pytest.mark.parametrize("place", [0, 9, 300, -100, -60, -45, -20, -1])
def test_a_flipped_bit(paths, capsys, place):
    data = bytearray((paths / "delta").read_bytes())
    data[place] ^= 4
    (paths / "delta").write_bytes(data)
    refuses(paths, capsys, "delta")


def test_a_delta_that_is_something_else(paths, capsys):
    (paths / "delta").write_bytes((paths / "base").read_bytes())
    refuses(paths, capsys, "not a weights delta")


def test_a_base_with_other_tensors(paths, capsys):
    save_file({"x": np.zeros(3000, np.float32)}, paths / "base")
    refuses(paths, capsys, "another base")


def test_a_base_with_other_bits(paths, capsys):
    data = bytearray((paths / "base").read_bytes())
    data[-5] ^= 1
    (paths / "base").write_bytes(data)
    refuses(paths, capsys, "another base")


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "BYTES", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    ],
)
def test_a_checkpoint_whose_header_lies(paths, capsys, header):
    (paths / "base").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refuses(paths, capsys, "base")


def test_a_checkpoint_that_is_cut_short(paths, capsys):
    (paths / "base").write_bytes((paths / "base").read_bytes()[:-9])
    refuses(paths, capsys, "base")


def test_paths_that_are_not_there(paths, capsys):
    assert weights("diff", paths / "nothing", paths / "next", "-o", paths / "d") == 2
    assert weights("apply", paths / "base", paths / "nothing", "-o", paths / "d") == 2
    (paths / "folder").mkdir()
    assert weights("diff", paths / "base", paths / "folder", "-o", paths / "d") == 2
    assert "no *.safetensors" in capsys.readouterr().err
    assert not (paths / "d").exists()


def test_an_index_that_names_a_missing_file(paths, capsys):
    (paths / "folder").mkdir()
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (paths / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights("diff", paths / "base", paths / "folder", "-o", paths / "d") == 2
    assert "model-00001-of-00002" in capsys.readouterr().err


def test_an_output_folder_that_holds_something(paths, capsys):
    folder = paths / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((paths / "next").read_bytes())
    assert weights("diff", paths / "base", folder, "-o", paths / "delta") == 0
    (paths / "out").mkdir()
    (paths / "out" / "precious").touch()
    refuses(paths, capsys, "exists")


def forge(path, change):
    """Write the delta again with another manifest, and every digest of it right."""
    with DeltaFile(path) as patch:
        manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(patch.manifest))
    change(manifest)
    data = path.read_bytes()
    offset = int.from_bytes(data[-64:-56], "little")
    plain = msgspec.msgpack.encode(manifest)
    stored = zstandard.compress(plain)
    numbers = data[-64:-56] + len(stored).to_bytes(8, "little")
    numbers += len(plain).to_bytes(4, "little") + data[-44:-40]
    digest = blake3(MAGIC + stored + numbers).digest()
    path.write_bytes(data[:offset] + stored + numbers + digest + END_MAGIC)


def set_path(name):
    def change(manifest):
        manifest["is_folder"] = True
        manifest["files"][0][0] = name
        row = manifest["files"][0][1][0]
        manifest["target"][row] = [name, *manifest["target"][row][1:]]

    return change


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc/evil", "a/../../evil", "", ".", "a//b", "a\\b", "C:evil", "a\0b", "a\nb"],
)
def test_a_delta_that_would_write_elsewhere(paths, capsys, name):
    forge(paths / "delta", set_path(name))
    refuses(paths, capsys, "delta.files")


def extents(field, value):
    def change(manifest):
        manifest["extents"][0][field] = value

    return change


def target(field, value):
    def change(manifest):
        manifest["target"][1][field] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        extents(0, 99),
        extents(1, 5),
        extents(2, 1 << 40),
        extents(2, 0),
        extents(3, 1 << 40),
        extents(4, "raw"),
        extents(5, 1 << 60),
        extents(6, b"short"),
        target(1, "F99"),
        target(2, [1 << 62, 1 << 62]),
        target(2, [-1]),
        target(2, [1 << 62] * 100_000),
        target(3, b"short"),
        target(4, 1 << 60),
        lambda m: m["target"].append(m["target"][0]),
        lambda m: m["files"][0][1].pop(),
        lambda m: m["files"].append(m["files"][0]),
        lambda m: m["extents"].clear(),
        lambda m: m.pop("base"),
        lambda m: m.update(is_folder="yes"),
        lambda m: m.update(unknown=msgspec.Raw(b"\x91" * 100_000 + b"\0")),
    ],
)
def test_a_manifest_that_contradicts_itself(paths, capsys, change):
    forge(paths / "delta", change)
    refuses(paths, capsys, "delta")


def test_more_files_than_may_be_open(paths, capsys):
    forge(paths / "delta", lambda m: m["files"].extend([["x", [0]]] * 10_000))
    refuses(paths, capsys, "at most 10000")


def test_a_target_digest_that_is_another(paths, capsys):
    forge(paths / "delta", target(3, bytes(16)))
    refuses(paths, capsys, "another digest")


def test_a_file_that_is_also_a_folder(paths, capsys):
    folder = paths / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((paths / "next").read_bytes())
    (folder / "x").write_text("plain")
    assert weights("diff", paths / "base", folder, "-o", paths / "delta") == 0

    def change(manifest):
        name = "model.safetensors/x"
        number = [row[0] for row in manifest["files"]].index("x")
        manifest["files"][number][0] = name
        manifest["target"][manifest["files"][number][1][0]][0] = name

    forge(paths / "delta", change)
    refuses(paths, capsys, "also a folder")


SCRIPT = """
import resource, signal, sys
from penstock.infra.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(["weights", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("action", ["diff", "apply"])
def test_a_full_disk_leaves_nothing_behind(paths, action):
    second = paths / {"diff": "next", "apply": "delta"}[action]
    before = sorted(paths.iterdir())
    command = [sys.executable, "-c", SCRIPT, "2000", action, paths / "base", second]
    done = subprocess.run(
        [*command, "-o", paths / "out"], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 2 and "OSError" in done.stderr and "/out'" in done.stderr
    assert sorted(paths.iterdir()) == before


def test_a_killed_writer_leaves_no_output_and_the_next_takes_over(paths):
    """The writer is stopped while it holds its partial output, then killed for good."""
    partial = paths / ".out.partial"
    script = (
        "import time, sys\nfrom pathlib import Path\n"
        "from penstock.infra.weights.files.output import new_file\n"
        "with new_file(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); print('there', flush=True); time.sleep(50)\n"
    )
    command = [sys.executable, "-c", script, str(paths / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"there\n"
        assert weights("apply", paths / "base", paths / "delta", "-o", paths / "out") == 2
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
    assert partial.exists() and not (paths / "out").exists()
    deadline = time.monotonic() + 30
    while weights("apply", paths / "base", paths / "delta", "-o", paths / "out"):
        assert time.monotonic() < deadline
    assert (paths / "out").read_bytes() == (paths / "next").read_bytes()
    assert not partial.exists()
