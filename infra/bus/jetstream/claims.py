"""The claim check: a large payload goes to the object store, a small pointer to the bus."""

import msgspec
from blake3 import blake3

from penstock.messages.base import Message
from penstock.messages.bus import ObjectStore
from penstock.messages.codec import decode, encode
from penstock.messages.errors import CodecError

CLAIM_HEADER = "Penstock-Claim"


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Pointer that the bus carries in place of the payload."""

    object_key: str
    num_bytes: int
    blake3: str


class Claims:
    """Packs messages for the bus and unpacks them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def pack(self, message: Message, num_bytes_max: int) -> tuple[bytes, dict[str, str]]:
        """Return payload and headers; a payload above `num_bytes_max` is stored first."""
        data = encode(message)
        if len(data) <= num_bytes_max:
            return data, {}
        digest = blake3(data).hexdigest()
        claim = Claim(object_key=f"claims/{digest}", num_bytes=len(data), blake3=digest)
        await self._store.put(claim.object_key, data)
        return msgspec.msgpack.encode(claim), {CLAIM_HEADER: "1"}

    async def unpack(self, data: bytes, headers: dict[str, str] | None) -> Message:
        """Return the message, fetched from the store where `data` is a claim.

        Raises:
            CodecError: Undecodable, or the stored bytes are not the claimed ones.
            NotFoundError: The claimed object is gone.

        """
        return decode(await self.fetch(data, headers))

    async def fetch(self, data: bytes, headers: dict[str, str] | None) -> bytes:
        """Return the encoded message, from the store where `data` is a claim; raises likewise."""
        if not headers or CLAIM_HEADER not in headers:
            return data
        try:
            claim = msgspec.msgpack.decode(data, type=Claim)
        except ValueError as error:
            raise CodecError(f"claim: {error}") from error
        stored = await self._store.get(claim.object_key)
        if blake3(stored).hexdigest() != claim.blake3:
            raise CodecError(f"claim: object {claim.object_key} has other bytes than claimed")
        return stored
