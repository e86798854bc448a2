"""Run directories and atomic files."""

import os
from pathlib import Path

import pytest

from penstock.actors.runtime.files import write_atomic
from penstock.infra.run.runs import RunDir, find_run
from penstock.messages.errors import BusError, NotFoundError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_atomic(path, b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_an_unknown_run_lists_the_known_ones(tmp_path: Path) -> None:
    write_atomic(tmp_path / "first" / "config.toml", b"")
    assert find_run("latest", tmp_path).run_id == "first"
    with pytest.raises(NotFoundError, match="first"):
        find_run("second", tmp_path)


def test_a_run_has_one_launcher(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "r"), RunDir(tmp_path / "r")
    with first.lock(), pytest.raises(BusError, match="another process"), second.lock():
        pass
    with second.lock():
        pass


def test_the_state_of_a_dead_launcher_is_no_state(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_state("nats://x")
    assert run.read_state() is not None
    run.state.write_bytes(run.state.read_bytes().replace(str(os.getpid()).encode(), b"99999999"))
    assert run.read_state() is None
