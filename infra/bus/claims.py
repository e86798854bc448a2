"""Claim checks: a large message goes to the object store, and a small claim to the bus.

```
 event ─▶ above inline_bytes? ─▶ its parts are stored; readers resolve the claims
       ─▶ still above its stream's limit? ─▶ stored whole; the bus resolves the claim
```
Objects are stored before the event that references them, each under a unique key, and the publisher
deletes them if the event is refused. `collector.py` deletes objects that nothing references.
"""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.infra.bus.settings import BusSection
from penstock.messages.base import Claim, Event, Message
from penstock.messages.bus import ObjectStore
from penstock.messages.codec import MESSAGE_BYTES_MAX, decode, encode
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.claims import digest_of, fetch
from penstock.messages.reading.parsing import parse_with

INLINE_BYTES = BusSection().inline_bytes
CLAIM_HEADER = "Penstock-Claim"
_EVENT, _CALL = "event", "call"
"""Words in object keys; the client deletes the objects of its own calls."""
_NONCE = bytes(12)
"""Of every object, whose key seals nothing else."""
FORGET_S_MAX = 10.0
_claims = msgspec.msgpack.Decoder(Claim)


class PackedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded message, ready for the bus."""

    data: bytes
    headers: dict[str, str]
    object_keys: tuple[str, ...]
    """Keys of the objects that were just stored for the message."""


class Claims:
    """Packer and unpacker of messages for the bus."""

    def __init__(
        self, store: ObjectStore, new_key: Callable[[str], str], inline_bytes: int = INLINE_BYTES
    ) -> None:
        """Create with `new_key`, which returns a unique key (`claim_key`) that contains a word."""
        self._store = store
        self._new_key = new_key
        self._inline_bytes = inline_bytes

    async def pack(self, event: Event, num_bytes_max: int) -> PackedMessage:
        """Encode an event; store what is too large, and delete it again if packing fails."""
        return await self._pack(event, num_bytes_max, _EVENT)

    async def pack_call(self, message: Message, num_bytes_max: int) -> PackedMessage:
        """Encode a request or a reply, which is stored whole or not at all."""
        return await self._pack(message, num_bytes_max, _CALL)

    async def _pack(self, message: Message, num_bytes_max: int, word: str) -> PackedMessage:
        keys: list[str] = []
        try:
            return await self._packed(message, num_bytes_max, word, keys)
        except BaseException:
            await self.forget(keys)
            raise

    async def _packed(
        self, message: Message, num_bytes_max: int, word: str, keys: list[str]
    ) -> PackedMessage:
        data = encode(message)
        if word == _EVENT and len(data) > self._inline_bytes and isinstance(message, Event):
            stored = {
                name: part.stored(await self._put(msgspec.msgpack.encode(part), word, keys))
                for name, part in message.parts.items()
            }
            if stored:
                data = encode(msgspec.structs.replace(message, **stored))
        if len(data) > MESSAGE_BYTES_MAX:
            name = type(message).__name__
            text = f"{len(data)} bytes, a message has at most {MESSAGE_BYTES_MAX}"
            raise CodecError(f"{name}: {text}")
        if len(data) <= num_bytes_max:
            return PackedMessage(data=data, headers={}, object_keys=tuple(keys))
        claim = await self._put(data, word, keys)
        return PackedMessage(
            data=msgspec.msgpack.encode(claim),
            headers={CLAIM_HEADER: "1"},
            object_keys=tuple(keys),
        )

    async def _put(self, data: bytes, word: str, keys: list[str]) -> Claim:
        key, secret = self._new_key(word), b""
        if word == _CALL:
            # A user's prompt must not lie readable on disk, least of all without consent to store
            # it; a store may keep what is deleted for long. The key is in no message on a stream.
            secret = AESGCM.generate_key(256)
            data = await asyncio.to_thread(AESGCM(secret).encrypt, _NONCE, data, key.encode())
        claim = Claim(object_key=key, num_bytes=len(data), blake3=digest_of(data), secret=secret)
        # Before the put: a put that is cancelled may still have stored the object.
        keys.append(claim.object_key)
        await self._store.put(claim.object_key, data)
        return claim

    async def unpack(self, data: bytes, headers: dict[str, str] | None) -> Message:
        """Return the message, fetched from the store where `data` is a claim.

        Raises:
            CodecError: It cannot be decoded, or its object is missing or different.
            StoreUnreachableError: The store did not answer.

        """
        claim = claim_of(data, headers)
        return decode(data if claim is None else await self._opened(claim))

    async def unpack_reply(self, data: bytes, headers: dict[str, str] | None) -> Message:
        """Unpack a reply and delete its object, which nobody else reads; raises like `unpack`."""
        message = await self.unpack(data, headers)
        claim = claim_of(data, headers)
        if claim is not None and f"-{_CALL}-" in claim.object_key:
            await self.forget((claim.object_key,))
        return message

    async def fetch(self, data: bytes, headers: dict[str, str] | None) -> bytes:
        """Return the encoded message, fetched if `data` is a claim; raises like `unpack`."""
        claim = claim_of(data, headers)
        return data if claim is None else await self._opened(claim)

    async def _opened(self, claim: Claim) -> bytes:
        data = await fetch(self._store, claim)
        if not claim.secret:
            return data
        try:
            cipher = AESGCM(claim.secret)
            return await asyncio.to_thread(cipher.decrypt, _NONCE, data, claim.object_key.encode())
        except (InvalidTag, ValueError) as error:
            raise CodecError(f"claim {claim.object_key}: sealed under another key") from error

    async def forget(self, keys: tuple[str, ...] | list[str]) -> None:
        """Delete objects that nothing will reference; never raises an error of the store."""
        # What cannot be deleted now is left to the collector.
        with contextlib.suppress(PenstockError, OSError):  # A TimeoutError is one.
            async with asyncio.timeout(FORGET_S_MAX):
                for key in keys:
                    await self._store.delete(key)


def claim_of(data: bytes, headers: dict[str, str] | None) -> Claim | None:
    """Return the claim that replaces a message, or None.

    Raises:
        CodecError: The header announces a claim, but the data is not one.

    """
    if not headers or CLAIM_HEADER not in headers:
        return None
    claim: Claim = parse_with(_claims, data, "claim")
    return claim
