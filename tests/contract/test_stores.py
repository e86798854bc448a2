"""Object stores pass `check_store`; the one on disk leaves no half object and no way out."""

import errno

import pytest
from tests.contract.check_store import CHECKS

from penstock.infra.stores import directory
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import ConfigError, CorruptDataError


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_directory_store_conforms(check, tmp_path):
    await check(DirectoryStore(tmp_path / "objects"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_memory_store_conforms(check):
    await check(MemoryStore())


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/etc/x", "a//b", "", ".hidden", "a/", "a\0b"]
)
async def test_a_key_never_leads_out_of_the_folder(key, tmp_path):
    store = DirectoryStore(tmp_path / "objects")
    for use in (store.get, store.exists, store.delete, lambda k: store.put(k, b"x")):
        with pytest.raises(ConfigError, match="object key"):
            await use(key)
    assert list(tmp_path.rglob("*")) == []


async def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)

    def full(path, data, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(directory, "write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        await store.put("k", b"x")
    monkeypatch.undo()
    assert not await store.exists("k")
    await store.put("k", b"y")
    assert await store.get("k") == b"y"


async def test_of_two_writers_at_once_one_wins(tmp_path, monkeypatch):
    """Fencing tokens are claimed by a put."""
    store = DirectoryStore(tmp_path)
    await store.put("token", b"first")
    monkeypatch.setattr(directory.Path, "is_file", lambda path: False)
    await store.put("token", b"first")
    with pytest.raises(CorruptDataError, match="'token'"):
        await store.put("token", b"second")
    monkeypatch.undo()
    assert await store.get("token") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
