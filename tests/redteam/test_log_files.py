"""A log file from a stranger is data: it writes nowhere else, executes nothing, and stays small."""

import struct
import tomllib

import msgspec
import pytest
import zstandard

from penstock.infra.cli import main
from penstock.infra.commands.log_file import read_entries, read_header
from penstock.messages.base import FORMAT
from penstock.messages.codec import encode
from penstock.messages.control import RunStarted
from penstock.messages.errors import PenstockError

HOSTILE_CONFIG = """
regions = [{ name = "west", serves = ["train", "eval", "live"] }]
[processes]
trainer = ["trainer"]
[bus]
server_path = "/tmp/evil/nats-server"
[store]
kind = "s3"
bucket = "stolen"
endpoint = "http://evil.example"
[sandbox_host]
checkpoints = "/home/victim"
[policy]
hidden_size = 32
"""


def log_file(path, *entries, run_id="r1"):
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as out:
        for entry in ({"penstock_log": FORMAT, "run_id": run_id}, *entries):
            data = entry if isinstance(entry, bytes) else msgspec.msgpack.encode(entry)
            out.write(struct.pack("<I", len(data)) + data)
    return path


def started(config_toml):
    event = RunStarted(run_id="r1", seed=0, config_toml=config_toml, versions={}, format=FORMAT)
    return {"kind": "event", "stream": "control", "sequence": 1, "stored_at": 0.0,
            "data": encode(event)}  # fmt: skip


def import_file(tmp_path, path):
    return main(["--runs-dir", str(tmp_path / "runs"), "log", "import", str(path)])


def test_an_import_takes_nothing_but_policy_and_trainer_settings(tmp_path):
    path = log_file(tmp_path / "log", started(HOSTILE_CONFIG))
    assert import_file(tmp_path, path) == 0
    config = tomllib.loads((tmp_path / "runs" / "r1" / "config.toml").read_text())
    assert config["policy"] == {"hidden_size": 32}
    assert set(config) == {"policy", "processes", "regions"}
    assert config["processes"] == {"trainer": ["trainer"]}


HOSTILE_CONFIGS = ["\x00", "[" * 50_000, "policy = 3", "[policy]\nhidden_size = -1",
                   "[policy]\nno_such = 1", "[trainer]\nsteps_max = inf"]  # fmt: skip


@pytest.mark.parametrize("config", HOSTILE_CONFIGS, ids=range(len(HOSTILE_CONFIGS)))
def test_a_hostile_configuration_is_refused_and_leaves_nothing(tmp_path, capsys, config):
    path = log_file(tmp_path / "log", started(config))
    assert import_file(tmp_path, path) != 0
    error = capsys.readouterr().err
    assert str(path) in error
    assert "Traceback" not in error
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("run_id", ["..", ".", "a/../../b", "/abs", "a.b", "", "a\0b", "a" * 5000])
def test_a_run_id_cannot_leave_the_runs_folder(tmp_path, run_id):
    path = log_file(tmp_path / "log", run_id=run_id)
    with pytest.raises(PenstockError):
        read_header(path)


@pytest.mark.parametrize("key", ["../../x", "/etc/x", "a//b", "a/./b", "", "a\0b", "a/../../b"])
def test_an_object_key_cannot_leave_the_store(tmp_path, capsys, key):
    entry = {"kind": "object", "key": key, "data": b"owned"}
    path = log_file(tmp_path / "log", entry, started(HOSTILE_CONFIG))
    assert import_file(tmp_path, path) != 0
    assert "Traceback" not in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


def test_one_large_entry_from_a_small_file_is_refused(tmp_path):
    entry = msgspec.msgpack.encode({"kind": "object", "key": "a", "data": bytes(400 << 20)})
    path = log_file(tmp_path / "log", entry)
    assert path.stat().st_size < 100_000
    with pytest.raises(PenstockError, match="unpacks to far more"):
        list(read_entries(path))


def test_many_entries_from_a_small_file_are_refused(tmp_path):
    entry = msgspec.msgpack.encode({"kind": "object", "key": "a", "data": bytes(1 << 20)})
    path = log_file(tmp_path / "log", *[entry] * 64)
    with pytest.raises(PenstockError, match="unpacks to far more"):
        for _ in read_entries(path):
            pass


def test_a_frame_that_demands_a_large_window_is_refused(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    path = tmp_path / "log"
    data = msgspec.msgpack.encode({"penstock_log": FORMAT, "run_id": "r1"})
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with path.open("wb") as file, compressor.stream_writer(file) as out:
        out.write(struct.pack("<I", len(data)) + data)
    with pytest.raises(PenstockError):
        read_header(path)


def test_a_deeply_nested_header_is_refused(tmp_path):
    path = tmp_path / "log"
    data = b"\x91" * 100_000 + b"\xc0"
    path.write_bytes(zstandard.compress(struct.pack("<I", len(data)) + data))
    with pytest.raises(PenstockError):
        read_header(path)
