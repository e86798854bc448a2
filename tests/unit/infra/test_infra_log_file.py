"""The log as one file: what goes in comes out, and damage is told."""

import struct
from pathlib import Path

import msgspec
import pytest
import zstandard
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.vault import ContentKey, Vault
from penstock.infra.commands.log_file import (
    export_log,
    import_log,
    log_types,
    read_entries,
    read_header,
)
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.base import FORMAT
from penstock.messages.control import RunFinished
from penstock.messages.errors import ConfigError, CorruptDataError, ErasedError, PenstockError
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.task import Purpose


def _verdict(number: int) -> Verdict:
    return Verdict(
        rollout_id=f"g{number}-m0", group_id=f"g{number}", group_index=number,
        purpose=Purpose.TRAIN, judge="hidden_tests", judge_version="1", outcome=Outcome.SOLVED,
        reward=1.0,
    )  # fmt: skip


async def _exported(tmp_path: Path) -> Path:
    bus = MemoryBus(
        MemoryServer(seed=0, clock=SystemClock()), run_id="r1", store=MemoryStore(), name="test"
    )
    store = DirectoryStore(tmp_path / "objects")
    await store.put("tasks/train", b"the tasks")
    await bus.publish([*(_verdict(i) for i in range(3)), RunFinished(reason="done", step=3)])
    path = tmp_path / "run.penstock"
    assert await export_log(bus, store, path) == 4
    return path


async def test_a_log_survives_the_way_through_a_file(tmp_path: Path) -> None:
    path = await _exported(tmp_path)
    assert read_header(path) == "r1"
    other = MemoryBus(
        MemoryServer(seed=0, clock=SystemClock()), run_id="r1", store=MemoryStore(), name="test"
    )
    store = DirectoryStore(tmp_path / "other")
    assert await import_log(other, store, path, Vault(store, bytes(32))) == 4
    assert await store.get("tasks/train") == b"the tasks"
    events = [d.event async for d in other.follow(log_types(), stop_at_end=True)]
    assert {repr(e) for e in events} == {
        *(repr(_verdict(i)) for i in range(3)),
        repr(RunFinished(reason="done", step=3)),
    }


async def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = await _exported(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptDataError):
        list(read_entries(path))


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(b"not a log at all")
    with pytest.raises(CorruptDataError, match="foreign"):
        read_header(path)


def _file(path: Path, *entries: object) -> Path:
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as out:
        for entry in entries:
            data = msgspec.msgpack.encode(entry)
            out.write(struct.pack("<I", len(data)) + data)
    return path


@pytest.mark.parametrize("run_id", ["../evil", "/tmp/evil", "", "a.*.>"])
def test_a_run_id_that_leads_elsewhere_is_refused(tmp_path: Path, run_id: str) -> None:
    path = _file(tmp_path / "log", {"penstock_log": FORMAT, "run_id": run_id})
    with pytest.raises(ConfigError, match="log: run_id: expected letters"):
        read_header(path)


HOSTILE = (
    [1, 2],
    {"x": 1},
    {"kind": "object", "key": 5, "data": b""},
    {"kind": "object", "key": "a", "data": "text"},
    {"kind": "other", "data": b""},
)


@pytest.mark.parametrize("entry", HOSTILE)
def test_a_hostile_entry_is_refused(tmp_path: Path, entry: object) -> None:
    path = _file(tmp_path / "log", {"penstock_log": FORMAT, "run_id": "r1"}, entry)
    with pytest.raises(CorruptDataError, match="log: a damaged entry"):
        list(read_entries(path))


async def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = await _exported(tmp_path)
    entries, content = list(read_entries(path)), path.read_bytes()
    for place in range(10, len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        try:
            found = list(read_entries(path))
        except PenstockError:
            continue
        assert found == entries, "a bit that carries nothing"


def _bus() -> MemoryBus:
    server = MemoryServer(seed=0, clock=SystemClock())
    return MemoryBus(server, run_id="r1", store=MemoryStore(), name="test")


@pytest.mark.parametrize("with_keys", [True, False])
async def test_users_keys_go_along_only_where_asked_for(tmp_path: Path, with_keys: bool) -> None:
    store, other = DirectoryStore(tmp_path / "objects"), DirectoryStore(tmp_path / "other")
    vault, imported = Vault(store, b"a" * 32), Vault(other, b"b" * 32)
    sealed = await vault.seal("acme/u-1", "q", b"what a user wrote")
    gone = await vault.seal("acme/u-2", "q", b"what another one wrote")
    await vault.erase("acme/u-2")
    found = [await vault.take_out(owner) for owner in await vault.owners()] if with_keys else []
    keys = [key for key in found if key is not None]
    path = tmp_path / "log"
    await export_log(_bus(), store, path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    await import_log(_bus(), other, path, imported)
    if with_keys:
        assert await imported.open(sealed, "q") == b"what a user wrote"
        assert keys[0].secret not in b"".join([await other.get(k) for k in await other.keys("")])
    else:
        with pytest.raises(ErasedError):
            await imported.open(sealed, "q")
    with pytest.raises(ErasedError):
        await imported.open(gone, "q")


KEY = {"kind": "content_key", "owner": "acme/u-1", "key_id": "0" * 16, "secret": bytes(64)}
HOSTILE_KEYS = [
    [KEY | {"owner": "../../x"}],
    [KEY | {"owner": "acme/u/1"}],
    [KEY | {"owner": "acme/" + "u" * 100}],
    [KEY | {"key_id": "x" * 1000}],
    [KEY | {"secret": bytes(63)}],
    [KEY | {"secret": bytes(1000)}],
    [KEY, KEY | {"secret": b"1" * 64}],
    [{"kind": "object", "key": "content-keys/acme/u-1", "data": b"x"}],
]


@pytest.mark.parametrize("entries", HOSTILE_KEYS, ids=range(len(HOSTILE_KEYS)))
async def test_a_hostile_key_is_refused(tmp_path: Path, entries: list[object]) -> None:
    path = _file(tmp_path / "log", {"penstock_log": FORMAT, "run_id": "r1"}, *entries)
    store = DirectoryStore(tmp_path / "objects")
    with pytest.raises(CorruptDataError):
        await import_log(_bus(), store, path, Vault(store, bytes(32)))


async def test_a_good_key_is_taken(tmp_path: Path) -> None:
    path = _file(tmp_path / "log", {"penstock_log": FORMAT, "run_id": "r1"}, KEY)
    store = DirectoryStore(tmp_path / "objects")
    vault = Vault(store, bytes(32))
    await import_log(_bus(), store, path, vault)
    wanted = {name: value for name, value in KEY.items() if name != "kind"}
    assert await vault.take_out("acme/u-1") == ContentKey(**wanted)
