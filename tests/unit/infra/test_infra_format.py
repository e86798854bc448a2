"""Data of format 1, which Penstock 0.1.0 wrote, is refused by name."""

import msgspec
import pytest
import xxhash

from penstock.actors.trainer.checkpoint import read_head
from penstock.infra.commands.log_file import _write, read_header
from penstock.infra.run.runs import check_log, find_run
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.base import FORMAT, check_format
from penstock.messages.control import RunStarted
from penstock.messages.errors import ConfigError, CorruptDataError, FormatError

REFUSAL = r"expected format 2, got format 1, written by Penstock 0\.1\.0: .*start a new run"


def test_this_version_s_format_passes():
    check_format(FORMAT, "it")


def test_another_format_is_named():
    with pytest.raises(FormatError, match=f"^a thing: {REFUSAL}"):
        check_format(1, "a thing")
    with pytest.raises(FormatError, match="got format 9, written by another version of Penstock"):
        check_format(9, "a thing")


@pytest.mark.parametrize("name", ["old", "latest"])
def test_a_run_folder_of_0_1_0_is_refused(tmp_path, name):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.toml").write_text("")
    state = {"run_id": "old", "url": "nats://x", "pid": 1, "started_at": 0.0}
    (folder / "state.json").write_bytes(msgspec.json.encode(state))
    with pytest.raises(FormatError, match=f"^run old: {REFUSAL}"):
        find_run(name, tmp_path)
    assert find_run(name, tmp_path, any_format=True).run_id == "old"
    (folder / "state.json").write_bytes(msgspec.json.encode(state | {"format": FORMAT}))
    assert find_run(name, tmp_path).run_id == "old"


@pytest.mark.parametrize("content", [b"", b"garbage", b"[1]", b'{"a":"\xff"}'])
def test_a_damaged_state_is_named(tmp_path, content):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"state\.json: .*: delete it"):
        find_run(str(tmp_path), tmp_path)


def test_a_renamed_folder_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text("")
    state = {"run_id": "r1", "format": FORMAT}
    (tmp_path / "state.json").write_bytes(msgspec.json.encode(state))
    with pytest.raises(ConfigError, match="that of run r1: name the folder r1 again"):
        find_run(str(tmp_path), tmp_path)


class Bus:
    run_id = "r1"

    def __init__(self, *versions: int) -> None:
        self._started = [
            RunStarted(run_id="r1", seed=0, config_toml="", versions={}, format=version)
            for version in versions
        ]

    async def last(self, event_type):
        assert event_type is RunStarted
        return type("Delivery", (), {"event": self._started[-1]}) if self._started else None


async def test_a_log_of_0_1_0_is_refused():
    with pytest.raises(FormatError, match=f"^the log of run r1: {REFUSAL}"):
        await check_log(Bus(1))
    await check_log(Bus(FORMAT))
    await check_log(Bus())


def test_an_exported_log_of_0_1_0_is_refused(tmp_path):
    import zstandard

    path = tmp_path / "run.penstock"
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as out:
        _write(out, {"penstock_log": 1, "run_id": "r1"})
    with pytest.raises(FormatError, match=f"run.penstock: {REFUSAL}"):
        read_header(path)


async def test_a_checkpoint_of_another_format_is_refused():
    store = MemoryStore()
    data = msgspec.json.encode({"step": 3, "weights_digest": "x", "format": 1})
    key = f"checkpoints/00000003-{xxhash.xxh3_128_hexdigest(data)}"
    await store.put(key, data)
    with pytest.raises(FormatError, match=f"^{key}: {REFUSAL}"):
        await read_head(store, key)
