"""A master key is rotated: content and pseudonyms stay, the old key opens nothing any more."""

import pytest

from penstock.actors.runtime.files import create_secret, read_secret
from penstock.actors.runtime.vault import KEYS_PREFIX, REWRAPPED_PREFIX, Vault
from penstock.gateway.identity import user_pseudonym
from penstock.infra.privacy.rotation import begin_rotation, end_rotation, rotate
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import CodecError, ConfigError, ErasedError


async def test_a_rotation_keeps_content_spools_and_pseudonyms(tmp_path):
    path, store = tmp_path / "master_key", MemoryStore()
    old = create_secret(path)
    sealed = await Vault(store, old).seal("acme/u-1", "q", b"words")
    waiting = Vault(store, old).seal_for_later("w", b"waiting")
    pseudonym = user_pseudonym(old, "acme", "alice")
    begin_rotation(path)
    with pytest.raises(ConfigError, match="a rotation has begun"):
        begin_rotation(path)
    vault = Vault(store, read_secret(path))
    assert await vault.open(sealed, "q") == b"words"
    assert await rotate(vault) == 1 and await rotate(vault) == 0
    assert await vault.open(waiting, "w") == b"waiting"
    await end_rotation(path, vault)
    new = read_secret(path)
    assert len(new) == 64 and user_pseudonym(new, "acme", "alice") == pseudonym
    assert await Vault(store, new).open(sealed, "q") == b"words"
    with pytest.raises(ConfigError, match="wrapped by another one"):
        await Vault(store, old).open(sealed, "q")
    with pytest.raises(CodecError):
        await Vault(store, new).open(waiting, "w")


@pytest.mark.parametrize("num_calls", range(4))
async def test_a_crash_at_any_call_of_a_rotation_loses_no_key(tmp_path, monkeypatch, num_calls):
    path, store = tmp_path / "master_key", MemoryStore()
    sealed = await Vault(store, create_secret(path)).seal("acme/u-1", "q", b"words")
    begin_rotation(path)
    left = num_calls

    def dying(function):
        async def call(*args):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("killed")
            return await function(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", dying(store.put))
        patch.setattr(store, "delete", dying(store.delete))
        with pytest.raises(OSError, match="killed"):
            await rotate(Vault(store, read_secret(path)))
    assert await Vault(store, read_secret(path)).open(sealed, "q") == b"words"
    await rotate(Vault(store, read_secret(path)))
    await end_rotation(path, Vault(store, read_secret(path)))
    assert await Vault(store, read_secret(path)).open(sealed, "q") == b"words"
    assert not await store.keys(REWRAPPED_PREFIX) and len(await store.keys(KEYS_PREFIX)) == 1


async def test_an_erased_key_is_refused_wherever_it_comes_from():
    store, secret = MemoryStore(), bytes(32)
    vault = Vault(store, secret)
    await vault.seal("acme/u-1", "q", b"words")
    key, raw = await vault.take_out("acme/u-1"), await store.get(KEYS_PREFIX + "acme/u-1")
    await vault.erase("acme/u-1")
    with pytest.raises(ErasedError, match="it was erased here"):
        await Vault(store, secret).put_in(key)
    await store.put(KEYS_PREFIX + "acme/u-1", raw)  # As a backup would.
    assert await Vault(store, secret).erase_again("acme/u-1", key.key_id)
    assert not await store.exists(KEYS_PREFIX + "acme/u-1")
    with pytest.raises(ErasedError, match="before the owner was erased"):
        await Vault(store, secret).seal("acme/u-1", "r", b"from another host", since=0)
    assert await Vault(store, secret).seal("acme/u-1", "r", b"came back", since=2)
