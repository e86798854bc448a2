"""Names, headers and paths that were made to harm: a clear error, or no harm."""

import os
import resource
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.infra.cli import main
from penstock.infra.weights.files.output import new_file, new_folder
from penstock.kernels import delta
from penstock.kernels.element_types import TensorSpec
from penstock.messages.errors import CorruptDataError

DEEP = b"[" * 100_000 + b"]" * 100_000


def weights(*arguments):
    return main(["weights", *map(str, arguments), "--threads", "1"])


def write_header(path, header):
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.fixture
def paths(tmp_path):
    save_file({"w": np.zeros(64, np.float32)}, tmp_path / "base")
    save_file({"w": np.ones(64, np.float32)}, tmp_path / "next")
    assert weights("diff", tmp_path / "base", tmp_path / "next", "-o", tmp_path / "delta") == 0
    return tmp_path


@pytest.mark.parametrize(
    "header",
    [
        b'{"__metadata__":' + DEEP + b"}",
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":' + DEEP + b"}}",
        b'{"w":{"dtype":"F32","shape":['
        + b",".join([b"9223372036854775807"] * 100_000)
        + b'],"data_offsets":[0,4]}}',
    ],
    ids=["deep-metadata", "deep-entry", "many-dimensions"],
)
def test_a_header_that_would_exhaust_its_reader(paths, capsys, header):
    write_header(paths / "next", header)
    assert weights("diff", paths / "base", paths / "next", "-o", paths / "out") == 2
    assert len(capsys.readouterr().err) < 500


def test_dimensions_are_bounded_before_they_are_multiplied():
    assert TensorSpec("a", "U8", (1,) * 64).num_bytes == 1
    with pytest.raises(ValueError, match="at most 64 sizes"):
        _ = TensorSpec("a", "U8", (1,) * 65).num_bytes


def test_an_index_nested_too_deep(paths, capsys):
    (paths / "folder").mkdir()
    (paths / "folder" / "model.safetensors.index.json").write_bytes(b'{"x":' + DEEP + b"}")
    assert weights("diff", paths / "base", paths / "folder", "-o", paths / "out") == 2
    assert "not an index" in capsys.readouterr().err


NAMES = ["a[/b]", "²", "9" * 5000, "a\nb", "\x1b[2J", "h." + "1" * 5000 + ".w", "a\0", ":smile:"]


def test_names_are_shown_as_they_are_and_move_no_terminal(paths, capsys):
    for path, value in (("base", 0.0), ("next", 1.0)):
        save_file({name: np.full(64, value, np.float32) for name in NAMES}, paths / path)
    assert weights("diff", paths / "base", paths / "next", "-o", paths / "delta") == 0
    capsys.readouterr()
    plot = ["--base", paths / "base", "--plot", paths / "plot.svg"]
    assert weights("inspect", paths / "delta", *plot, "--all") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[2J" in shown
    assert all(name in shown for name in ("a[/b]", "²", "a\\nb", ":smile:"))
    ElementTree.parse(paths / "plot.svg")
    save_file({"w": np.zeros(1)}, paths / "other")
    assert weights("verify", paths / "other", paths / "delta") == 1
    assert weights("apply", paths / "other", paths / "delta", "-o", paths / "out") == 2
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err


@pytest.mark.parametrize(
    "name", ["a:b.txt", "a\\b", "a\nb", b"\xff".decode(errors="surrogateescape")]
)
def test_a_file_that_no_delta_could_name_is_refused_when_the_delta_is_made(paths, capsys, name):
    (paths / "folder").mkdir()
    (paths / "next").rename(paths / "folder" / "model.safetensors")
    (paths / "folder" / name).touch()
    assert weights("diff", paths / "base", paths / "folder", "-o", paths / "out") == 2
    assert "rename it" in capsys.readouterr().err
    assert not (paths / "out").exists()


def test_a_subfolder_that_cannot_be_read_is_not_passed_over(paths, capsys, monkeypatch):
    """By a failing listing: who runs as root may read any folder."""
    (paths / "folder" / "sub").mkdir(parents=True)
    (paths / "next").rename(paths / "folder" / "model.safetensors")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert weights("diff", paths / "base", paths / "folder", "-o", paths / "out") == 2
    assert "folder/sub" in capsys.readouterr().err


def test_a_pipe_or_a_folder_is_no_file(paths, capsys):
    os.mkfifo(paths / "pipe")
    (paths / "folder").mkdir()
    for wrong in (paths / "pipe", paths / "folder"):
        assert weights("apply", paths / "base", wrong, "-o", paths / "out") == 2
        assert f"{wrong}: expected a file" in capsys.readouterr().err
    assert weights("diff", paths / "pipe", paths / "next", "-o", paths / "out") == 2
    assert "expected a file" in capsys.readouterr().err


def test_no_output_takes_the_place_of_an_input(paths, capsys):
    before = {name: (paths / name).read_bytes() for name in ("base", "next", "delta")}
    base, target, patch = (paths / name for name in before)
    assert weights("diff", base, target, "-o", base) == 2
    assert weights("diff", base, target, "-o", target) == 2
    assert weights("apply", base, patch, "-o", patch) == 2
    assert weights("merge", base, patch, "-o", patch) == 2
    assert weights("inspect", patch, "--plot", patch) == 2
    assert capsys.readouterr().err.count("name another") == 5
    assert before == {name: (paths / name).read_bytes() for name in before}


def test_a_file_may_be_brought_up_to_date_in_its_place(paths):
    assert weights("apply", paths / "base", paths / "delta", "-o", paths / "base") == 0
    assert (paths / "base").read_bytes() == (paths / "next").read_bytes()


def test_a_link_in_the_place_of_a_partial_output_is_not_followed(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (tmp_path / ".a.partial").symlink_to(tmp_path / "precious" / "file")
    (tmp_path / ".b.partial").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="partial"), new_file(tmp_path / "a"):
        pass
    with pytest.raises(OSError, match="partial"), new_folder(tmp_path / "b"):
        pass
    assert (tmp_path / "precious" / "file").read_text() == "kept"


def test_an_odd_number_of_half_bytes_is_refused():
    base = np.zeros(8, np.uint8)
    payload = bytearray(delta.encode(base, base, delta.Dtype.INT4X2)[:-8])
    payload[8:16] = (17).to_bytes(8, "little")
    with pytest.raises(CorruptDataError, match="half bytes"):
        delta.decode(base, bytes(payload) + delta.checksum(payload))


def test_more_files_than_a_process_may_usually_open(paths, request):
    """Every file stays open: the tool asks for as many as the system allows."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    for name, value in (("a", 0.0), ("b", 1.0)):
        (paths / name).mkdir()
        save_file({"w": np.full(64, value, np.float32)}, paths / name / "model.safetensors")
        for number in range(70):
            (paths / name / f"{number}.json").touch()
    assert weights("diff", paths / "a", paths / "b", "-o", paths / "d") == 0
