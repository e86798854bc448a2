"""Users' content keys: what opens, what does not, and what is gone."""

import secrets
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.runtime.files import create_secret
from penstock.actors.runtime.vault import KEYS_PREFIX, NUM_KEYS_MAX, Vault
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import CodecError, ConfigError, ErasedError

MASTER = bytes(range(32))


@settings(max_examples=25)
@given(data=st.binary(min_size=1, max_size=200), what=st.text(min_size=1, max_size=20))
async def test_another_process_opens_it_and_sealing_again_gives_the_same_bytes(data, what):
    store = MemoryStore()
    vault = Vault(store, MASTER)
    sealed = await vault.seal("acme/u-1", what, data)
    assert await vault.seal("acme/u-1", what, data) == sealed
    assert await Vault(store, MASTER).seal("acme/u-1", what, data) == sealed
    assert await Vault(store, MASTER).open(sealed, what) == data


async def test_content_opens_for_its_own_event_owner_and_master_key_alone():
    store = MemoryStore()
    vault = Vault(store, MASTER)
    sealed = await vault.seal("acme/u-1", "q1", b"words")
    with pytest.raises(CodecError, match="q2"):
        await vault.open(sealed, "q2")
    await vault.seal("acme/u-2", "q1", b"words")
    await store.delete(KEYS_PREFIX + "acme/u-2")
    await store.put(KEYS_PREFIX + "acme/u-2", await store.get(KEYS_PREFIX + "acme/u-1"))
    with pytest.raises(ConfigError, match="wrapped by another one"):
        await Vault(store, MASTER).seal("acme/u-2", "q1", b"words")
    with pytest.raises(ConfigError, match="wrapped by another one"):
        await Vault(store, bytes(32)).open(sealed, "q1")


async def test_an_erased_user_s_content_is_gone_and_a_new_key_does_not_open_it(tmp_path):
    store = DirectoryStore(tmp_path / "objects")
    vault, trainer = Vault(store, MASTER), Vault(store, MASTER)
    sealed = await vault.seal("acme/u-1", "q1", b"words")
    kept = await vault.seal("acme/u-2", "q2", b"other words")
    file = tmp_path / "objects" / KEYS_PREFIX / "acme" / "u-1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert await vault.erase("acme/u-1") and not await vault.erase("acme/u-1")
    assert not file.exists()
    for other in (vault, trainer):
        with pytest.raises(ErasedError, match="acme/u-1"):
            await other.open(sealed, "q1")
        assert await other.open(kept, "q2") == b"other words"
    again = await vault.seal("acme/u-1", "q1", b"words")
    assert again.key_id != sealed.key_id
    with pytest.raises(ErasedError):
        await trainer.open(sealed, "q1")
    assert await trainer.open(again, "q1") == b"words"


async def test_of_two_gateways_that_make_a_key_one_s_is_kept(monkeypatch):
    store = MemoryStore()
    first, second = Vault(store, MASTER), Vault(store, MASTER)

    async def unseen(owner):
        monkeypatch.undo()

    monkeypatch.setattr(second, "_read", unseen)
    sealed = await first.seal("a/u", "q", b"x")
    assert (await second.seal("a/u", "q", b"x")).key_id == sealed.key_id


async def test_what_waits_for_its_key_is_sealed_too():
    vault = Vault(MemoryStore(), MASTER)
    waiting = vault.seal_for_later("q", b"words")
    assert vault.is_for_later(waiting) and b"words" not in waiting.data
    assert await Vault(MemoryStore(), MASTER).open(waiting, "q") == b"words"


async def test_keys_in_memory_are_bounded():
    vault = Vault(MemoryStore(), MASTER)
    for index in range(NUM_KEYS_MAX + 5):
        vault._keep(f"a/{index}", "k", secrets.token_bytes(64))
    assert len(vault._keys) == NUM_KEYS_MAX


def test_a_secret_is_made_once_and_private(tmp_path):
    path = tmp_path / "run" / "master_key"
    secret = create_secret(path)
    assert len(secret) == 32 and create_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("short")
    with pytest.raises(ConfigError, match="master_key: expected 64 hexadecimal digits"):
        create_secret(path)
