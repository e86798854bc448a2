"""Wrong input is told in one clear line, before anything is started; exit code 2."""

import pytest

from penstock.infra.cli import main

from .launched import TINY, penstock


@pytest.fixture
def refused(capsys):
    """Return the one line that a command is refused with."""

    def words(runs, *arguments):
        assert main(["--runs-dir", str(runs), *arguments]) == 2
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == 1, said
        return said.err.strip()

    return words


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trainer.lerning_rate=1", ["trainer", "lerning_rate"]),
        ("trainer.loss.correction=tis", ["trainer.loss.correction", "token_tis", "'tis'"]),
        ("pacer.group_size=many", ["pacer.group_size", "int", "str"]),
        ("trainer.loss.temperature=0.5", ["trainer.loss", "temperature"]),
        ("prepare.num_train_tasks=0", ["num_train_tasks", "0"]),
        ("trainer", ["--set trainer", "KEY=VALUE"]),
        ("regions.west=1", ["regions"]),
    ],
)
def test_a_wrong_setting_is_named(refused, tmp_path, setting, words):
    line = refused(tmp_path, "run", "--config", str(TINY), "--set", setting)
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_unreadable_configuration_is_named(refused, tmp_path):
    path = tmp_path / "run.toml"
    assert f"{path}: no such configuration" in refused(tmp_path, "run", "--config", str(path))
    path.write_text("[run\n")
    assert f"{path}: not TOML" in refused(tmp_path, "run", "--config", str(path))


@pytest.mark.parametrize("command", [("run", "--resume"), ("replay",), ("status",), ("log", "cat")])
def test_an_unknown_run_is_named_with_what_there_is(refused, tmp_path, command):
    line = refused(tmp_path, *command, "nightly")
    assert "'nightly'" in line
    assert str(tmp_path) in line


def test_missing_machines_are_told_before_anything_is_started(refused, tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    empty = str(tmp_path / "empty")
    monkeypatch.setenv("PENSTOCK_CACHE", empty)
    line = refused(runs, "run", "--config", str(TINY))
    assert empty in line and "make setup" in line
    assert not runs.exists()


def test_a_run_id_must_be_one_token(refused, tmp_path):
    line = refused(tmp_path, "run", "--config", str(TINY), "--run-id", "a.b/c")
    assert "--run-id" in line and "'a.b/c'" in line


def test_what_is_no_log_is_not_imported(tmp_path):
    """By the program itself: its exit code, and nothing beside the line."""
    path = tmp_path / "x.penstock"
    path.write_bytes(b"nothing of ours")
    done = penstock(tmp_path / "runs", "log", "import", str(path))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert str(path) in line
