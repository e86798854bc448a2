"""`penstock images gc`: what it removes, and what it leaves to builds that run."""

import fcntl
import json
import threading

import msgspec
import pytest

from penstock.envs.microvm.images.layers import ImageLayer, entry_path, layer_folder, layer_path
from penstock.infra.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    folder = layer_folder()
    folder.mkdir(parents=True)
    return folder


def put(folder, digest, name=""):
    layer_path(folder, digest).write_text(digest)
    if name:
        layer = ImageLayer(name=name, digest=digest, inputs="", num_bytes=1)
        entry_path(folder, name).write_bytes(msgspec.json.encode(layer))


def test_what_has_no_name_and_what_killed_builds_left_goes(folder, capsys):
    put(folder, "a" * 64, "org/kept:1")
    put(folder, "b" * 64)
    (folder / "tmpkilled" / "root").mkdir(parents=True)
    assert main(["images", "gc", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"removed": [f"{'b' * 64}.erofs", "tmpkilled"]}
    assert layer_path(folder, "a" * 64).is_file()


def test_a_layer_that_is_being_built_stays(folder, capsys):
    put(folder, "c" * 64)
    with (folder / "build.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        removal = threading.Thread(target=main, args=(["images", "gc"],))
        removal.start()
        removal.join(0.2)
        put(folder, "c" * 64, "built")
    removal.join(20.0)
    assert "0 files removed" in capsys.readouterr().out
    assert layer_path(folder, "c" * 64).is_file()
