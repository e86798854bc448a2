"""Content keys, one per tenant and user, stored outside the log and deleted to erase a user.

```
 master key (a file of the service) ──wraps──▶ content-keys/<tenant>/<user>, an object of the store
                                                   └─seals─▶ turns, comments, corrections in the log
```
Sealing is deterministic (AES-SIV, RFC 5297): sealing the same event twice gives the same bytes.

An erasure leaves a tombstone, `erased-keys/<tenant>/<user>/<number>`, before it deletes the key. A
writer names the number of erasures that it knew of when the content came to it, and `seal` refuses
content from before an erasure. So what waits on another host's disk gets no new key.

The master key's file may have three lines, which `rotated_keys` writes: the master key, the key of
pseudonyms, and the master key before it, under which `open` and `rewrap` still read.
"""

import contextlib
import secrets
from collections import OrderedDict
from typing import Annotated

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from penstock.messages.bus import ObjectStore
from penstock.messages.errors import (
    CodecError,
    ConfigError,
    CorruptDataError,
    ErasedError,
    NotFoundError,
)
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.reading.sealed import Sealed

KEYS_PREFIX = "content-keys/"
REWRAPPED_PREFIX = "content-keys-rewrapped/"
"""Keys on their way to another master key; a key is never without one complete copy."""
ERASED_PREFIX = "erased-keys/"
KEY_BYTES = 64
"""AES-SIV with 256 bits: two keys of 32 bytes."""
NUM_KEYS_MAX = 10_000
"""Maximum number of keys cached in memory."""
_SERVICE = "service"
"""Owner of content that waits for its user's key, sealed under the service's own key."""
_SECRET_BYTES = 32


def pseudonym_key(secret: bytes) -> bytes:
    """Return the key of pseudonyms, which stays when the master key is rotated."""
    return secret[_SECRET_BYTES : 2 * _SECRET_BYTES] or secret


def rotated_keys(secret: bytes) -> bytes:
    """Return a new master key, with what it needs of the one before.

    Every process gets it before `Vault.rewrap`; afterwards `settled_keys` drops the old one.
    """
    return secrets.token_bytes(_SECRET_BYTES) + pseudonym_key(secret) + secret[:_SECRET_BYTES]


def settled_keys(secret: bytes) -> bytes:
    """Return the keys without the master key before."""
    return secret[: 2 * _SECRET_BYTES]


class ContentKey(msgspec.Struct, frozen=True, kw_only=True):
    """A user's key in plain form, for transfer to another vault; it opens all their content."""

    owner: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}/[A-Za-z0-9_-]{1,80}\Z")]
    """Owner of the key, as `<tenant>/<user>`."""
    key_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    secret: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class _StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    key_id: str
    wrapped: bytes


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    key_id: str
    cipher: AESSIV


class Vault:
    """Seals and opens users' content, and erases their keys."""

    def __init__(self, store: ObjectStore, secret: bytes, previous: bytes | None = None) -> None:
        """Open the vault in a run's object store.

        Args:
            store: Object store of the run.
            secret: Content of the master key's file: one to three keys of 32 bytes.
            previous: Master key before the last rotation; default: the third key of `secret`.

        """
        self._store = store
        previous = secret[2 * _SECRET_BYTES :] if previous is None else previous
        masters = [secret[:_SECRET_BYTES], *([previous] if previous else [])]
        self._wrapping = [AESSIV(_derived(key, "wraps content keys")) for key in masters]
        self._own = [AESSIV(_derived(key, "seals what waits for its key")) for key in masters]
        self._keys: OrderedDict[str, _Key] = OrderedDict()
        self._erasures: OrderedDict[str, int] = OrderedDict()
        """Owner -> erasures seen; may lag behind the store, never ahead."""

    async def seal(self, owner: str, what: str, data: bytes, *, since: int | None = None) -> Sealed:
        """Seal bytes for an owner `<tenant>/<user>`, creating its key if it has none.

        Args:
            owner: The owner.
            what: Name of the content, which `open` must repeat.
            data: The content.
            since: Erasures of the owner before the content came (`num_erasures`); default: it is
                of now.

        Raises:
            ErasedError: The owner was erased after the content came.
            ConfigError: The owner's key was wrapped by another master key.
            StoreUnreachableError: The store did not answer.

        """
        key = self._keys.get(owner)
        if key is None:
            await self._check_not_erased(owner, since)
            key = await self._read(owner) or await self._make(owner, since)
        # A cached key is of before the erasure, if there was one: then nobody can open this.
        return Sealed(
            owner=owner, key_id=key.key_id, data=key.cipher.encrypt(data, [what.encode()])
        )

    def seal_for_later(self, what: str, data: bytes, since: int = 0) -> Sealed:
        """Seal bytes that wait on this machine's disk until their user's key is available.

        Args:
            what: Name of the content.
            data: The content.
            since: Erasures of its owner before the content came; too few only lose the content.

        """
        data = self._own[0].encrypt(data, [what.encode()])
        return Sealed(owner=_SERVICE, key_id=f"{_SERVICE}.{since}", data=data)

    async def open(self, sealed: Sealed, what: str) -> bytes:
        """Open what `seal` or `seal_for_later` made for the same `what`.

        Raises:
            ErasedError: The key is gone, and the content with it.
            CodecError: It was sealed for something else, or changed since.
            StoreUnreachableError: The store of keys did not answer.

        """
        is_own = self.is_for_later(sealed)
        for cipher in self._own if is_own else [(await self._key_of(sealed)).cipher]:
            with contextlib.suppress(InvalidTag):
                return cipher.decrypt(sealed.data, [what.encode()])
        raise CodecError(f"content of {what}: sealed for something else, or changed")

    @staticmethod
    def is_for_later(sealed: Sealed) -> bool:
        """Return whether `seal_for_later` made this."""
        return sealed.owner == _SERVICE

    @staticmethod
    def since(sealed: Sealed) -> int:
        """Return the `since` that `seal_for_later` was given."""
        number = sealed.key_id.partition(".")[2]
        return int(number) if number.isdecimal() else 0

    async def num_erasures(self, owner: str) -> int:
        """Return how often an owner was erased; from memory while its key is cached."""
        if owner in self._keys and owner in self._erasures:
            return self._erasures[owner]
        num = self._erasures.get(owner, 0)
        while await self._store.exists(f"{ERASED_PREFIX}{owner}/{num}"):
            num += 1
        self._erasures[owner] = num
        self._erasures.move_to_end(owner)
        if len(self._erasures) > NUM_KEYS_MAX:
            self._erasures.popitem(last=False)
        return num

    def num_erasures_known(self, owner: str) -> int:
        """Return how often an owner was erased as far as this process knows."""
        return self._erasures.get(owner, 0)

    async def key_id(self, owner: str) -> str:
        """Return the id of an owner's key; empty if it has none. Raises the errors of `seal`."""
        # Another process may have erased or replaced the key since it was cached.
        self.forget(owner)
        key = await self._read(owner)
        return key.key_id if key is not None else ""

    async def owners(self) -> list[str]:
        """Return the owners that have a key, sorted."""
        return sorted(key.removeprefix(KEYS_PREFIX) for key in await self._store.keys(KEYS_PREFIX))

    async def take_out(self, owner: str) -> ContentKey | None:
        """Return an owner's key for another vault, or None. Raises the errors of `seal`."""
        found = await self._unwrapped(owner)
        return None if found is None else ContentKey(owner=owner, key_id=found[0], secret=found[1])

    async def put_in(self, key: ContentKey) -> None:
        """Store a key that came from another vault.

        Raises:
            CorruptDataError: The owner already has a different key.
            ErasedError: The owner was erased here, and this key with it.

        """
        if key.key_id in await self._erased_keys(key.owner):
            raise ErasedError(f"key {key.key_id} of {key.owner}: it was erased here")
        await self._store.put(KEYS_PREFIX + key.owner, self._wrapped(key))

    async def erase(self, owner: str) -> bool:
        """Delete an owner's key, making its content unreadable; return whether there was one.

        Content that came before and is not sealed yet is refused from now on, on every host.
        """
        self.forget(owner)
        found = await self._unwrapped(owner)
        # The tombstone first: a writer that finds no key looks for it once more.
        await self._bury(owner, found[0] if found else "")
        for prefix in (KEYS_PREFIX, REWRAPPED_PREFIX):
            await self._store.delete(prefix + owner)
        return found is not None

    async def erase_again(self, owner: str, key_id: str) -> bool:
        """Delete a key that was erased before and is back, e.g. from a backup."""
        self.forget(owner)
        found = await self._unwrapped(owner)
        if found is None or found[0] != key_id:
            return False
        return await self.erase(owner)

    async def rewrap(self) -> int:
        """Wrap the keys under the current master key; return how many were not. Can be repeated."""
        for owner in await self._store.keys(REWRAPPED_PREFIX):
            await self._move_rewrapped(owner.removeprefix(REWRAPPED_PREFIX))
        num = 0
        for owner in await self.owners():
            data = await self._store.get(KEYS_PREFIX + owner)
            stored = parse_msgpack(data, _StoredKey, f"key of {owner}")
            try:
                self._wrapping[0].decrypt(stored.wrapped, [owner.encode()])
            except InvalidTag:
                secret = self._secret_of(owner, stored)
                key = ContentKey(owner=owner, key_id=stored.key_id, secret=secret)
                await self._store.put(REWRAPPED_PREFIX + owner, self._wrapped(key))
                await self._store.delete(KEYS_PREFIX + owner)
                await self._move_rewrapped(owner)
                num += 1
        return num

    async def _move_rewrapped(self, owner: str) -> None:
        data = await self._store.get(REWRAPPED_PREFIX + owner)
        if not await self._store.exists(KEYS_PREFIX + owner):
            await self._store.put(KEYS_PREFIX + owner, data)
        await self._store.delete(REWRAPPED_PREFIX + owner)

    def _wrapped(self, key: ContentKey) -> bytes:
        wrapped = self._wrapping[0].encrypt(key.secret, [key.owner.encode()])
        return msgspec.msgpack.encode(_StoredKey(key_id=key.key_id, wrapped=wrapped))

    async def _bury(self, owner: str, key_id: str) -> None:
        while True:
            num = await self.num_erasures(owner)
            # Of two erasures at once one gets the number, the other the next.
            with contextlib.suppress(CorruptDataError):
                await self._store.put(f"{ERASED_PREFIX}{owner}/{num}", key_id.encode())
                self._erasures[owner] = num + 1
                return

    async def _erased_keys(self, owner: str) -> set[str]:
        names = [f"{ERASED_PREFIX}{owner}/{n}" for n in range(await self.num_erasures(owner))]
        return {(await self._store.get(name)).decode("ascii", "replace") for name in names}

    async def _check_not_erased(self, owner: str, since: int | None) -> None:
        if since is not None and await self.num_erasures(owner) > since:
            raise ErasedError(f"content of {owner}: it came before the owner was erased")

    def forget(self, owner: str) -> None:
        """Remove an owner's key from the in-memory cache."""
        self._keys.pop(owner, None)

    async def _key_of(self, sealed: Sealed) -> _Key:
        key = self._keys.get(sealed.owner)
        # An erased user who came back has a new key, which the cache may not know yet.
        if key is None or key.key_id != sealed.key_id:
            key = await self._read(sealed.owner)
        if key is None or key.key_id != sealed.key_id:
            raise ErasedError(f"content of {sealed.owner}: its key {sealed.key_id} was erased")
        return key

    async def _read(self, owner: str) -> _Key | None:
        found = await self._unwrapped(owner)
        return None if found is None else self._keep(owner, *found)

    async def _unwrapped(self, owner: str) -> tuple[str, bytes] | None:
        """Return id and secret of an owner's key."""
        # During a rotation the second place has the key while the first is being replaced.
        for prefix in (KEYS_PREFIX, REWRAPPED_PREFIX)[: len(self._wrapping)]:
            with contextlib.suppress(NotFoundError):
                data = await self._store.get(prefix + owner)
                stored = parse_msgpack(data, _StoredKey, f"key of {owner}")
                return stored.key_id, self._secret_of(owner, stored)
        return None

    def _secret_of(self, owner: str, stored: _StoredKey) -> bytes:
        for cipher in self._wrapping:
            with contextlib.suppress(InvalidTag):
                return cipher.decrypt(stored.wrapped, [owner.encode()])
        text = "the run's content keys were wrapped by another one: give every host the same file"
        raise ConfigError(f"store.master_key_file: {text}")

    async def _make(self, owner: str, since: int | None) -> _Key:
        """Create an owner's key; of several processes at once, all use the first key stored."""
        key = ContentKey(
            owner=owner, key_id=secrets.token_hex(8), secret=secrets.token_bytes(KEY_BYTES)
        )
        try:
            await self.put_in(key)
        except CorruptDataError:
            # Another process was first: use its key, or start over if it was erased already.
            return await self._read(owner) or await self._make(owner, since)
        # An erasure may have come since the last look: its tombstone precedes the deletion.
        try:
            await self._check_not_erased(owner, since)
        except ErasedError:
            await self._store.delete(KEYS_PREFIX + owner)
            raise
        return self._keep(owner, key.key_id, key.secret)

    def _keep(self, owner: str, key_id: str, secret: bytes) -> _Key:
        key = _Key(key_id=key_id, cipher=AESSIV(secret))
        self._keys[owner] = key
        self._keys.move_to_end(owner)
        if len(self._keys) > NUM_KEYS_MAX:
            self._keys.popitem(last=False)
        return key


def _derived(master_key: bytes, purpose: str) -> bytes:
    return blake3(master_key, derive_key_context=f"penstock: {purpose}").digest(KEY_BYTES)
