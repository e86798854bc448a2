"""Content keys, one per tenant and user, stored outside the log and deleted to erase a user.

```
 master key (a file of the service) ──wraps──▶ content-keys/<tenant>/<user>, an object of the store
                                                   └─seals─▶ turns, comments, corrections in the log
```
Sealing is deterministic (AES-SIV, RFC 5297): sealing the same event twice gives the same bytes.
"""

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
KEY_BYTES = 64
"""AES-SIV with 256 bits: two keys of 32 bytes."""
NUM_KEYS_MAX = 10_000
"""Maximum number of keys cached in memory."""
_SERVICE = "service"
"""Owner and key id of content that waits for its user's key, sealed under the service's own key."""


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

    def __init__(self, store: ObjectStore, master_key: bytes) -> None:
        """Open the vault in a run's object store.

        Args:
            store: Object store of the run.
            master_key: Master key of the service, 32 bytes.

        """
        self._store = store
        self._wrapping = AESSIV(_derived(master_key, "wraps content keys"))
        self._own = AESSIV(_derived(master_key, "seals what waits for its key"))
        self._keys: OrderedDict[str, _Key] = OrderedDict()

    async def seal(self, owner: str, what: str, data: bytes) -> Sealed:
        """Seal bytes for an owner `<tenant>/<user>`, creating its key if it has none.

        Raises:
            ConfigError: The owner's key was wrapped by another master key.
            StoreUnreachableError: The store did not answer.

        """
        key = self._keys.get(owner) or await self._read(owner) or await self._make(owner)
        return Sealed(
            owner=owner, key_id=key.key_id, data=key.cipher.encrypt(data, [what.encode()])
        )

    def seal_for_later(self, what: str, data: bytes) -> Sealed:
        """Seal bytes that wait on this machine's disk until their user's key is available."""
        data = self._own.encrypt(data, [what.encode()])
        return Sealed(owner=_SERVICE, key_id=_SERVICE, data=data)

    async def open(self, sealed: Sealed, what: str) -> bytes:
        """Open what `seal` or `seal_for_later` made for the same `what`.

        Raises:
            ErasedError: The key is gone, and the content with it.
            CodecError: It was sealed for something else, or changed since.
            StoreUnreachableError: The store of keys did not answer.

        """
        cipher = self._own if self.is_for_later(sealed) else (await self._key_of(sealed)).cipher
        try:
            return cipher.decrypt(sealed.data, [what.encode()])
        except InvalidTag as error:
            raise CodecError(f"content of {what}: sealed for something else, or changed") from error

    @staticmethod
    def is_for_later(sealed: Sealed) -> bool:
        """Return whether `seal_for_later` made this."""
        return (sealed.owner, sealed.key_id) == (_SERVICE, _SERVICE)

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

        """
        wrapped = self._wrapping.encrypt(key.secret, [key.owner.encode()])
        data = msgspec.msgpack.encode(_StoredKey(key_id=key.key_id, wrapped=wrapped))
        await self._store.put(KEYS_PREFIX + key.owner, data)

    async def erase(self, owner: str) -> bool:
        """Delete an owner's key, making its content unreadable; return whether there was one."""
        self.forget(owner)
        name = KEYS_PREFIX + owner
        was_there = await self._store.exists(name)
        await self._store.delete(name)
        return was_there

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
        try:
            data = await self._store.get(KEYS_PREFIX + owner)
        except NotFoundError:
            return None
        stored = parse_msgpack(data, _StoredKey, f"key of {owner}")
        try:
            return stored.key_id, self._wrapping.decrypt(stored.wrapped, [owner.encode()])
        except InvalidTag as error:
            text = (
                "the run's content keys were wrapped by another one: give every host the same file"
            )
            raise ConfigError(f"store.master_key_file: {text}") from error

    async def _make(self, owner: str) -> _Key:
        """Create an owner's key; of several processes at once, all use the first key stored."""
        key = ContentKey(
            owner=owner, key_id=secrets.token_hex(8), secret=secrets.token_bytes(KEY_BYTES)
        )
        try:
            await self.put_in(key)
        except CorruptDataError:
            # Another process was first: use its key, or start over if it was erased already.
            return await self._read(owner) or await self._make(owner)
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
