"""What a JetStream bucket says of one object: the JSON of the NATS object store."""

import base64
import hashlib
import secrets
from datetime import UTC, datetime
from typing import Self

import msgspec

from penstock.messages.errors import CodecError, CorruptDataError
from penstock.messages.reading.parsing import parse_json

SMALL_BYTES = 32 << 10
"""Up to here an object's bytes come with what it is: in one round trip, rather than two."""
_DATA = "penstock-data"


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message under an object's name; fields of other clients that we need not are ignored."""

    name: str
    bucket: str
    nuid: str
    """Names its chunks."""
    size: int
    """Size in bytes."""
    mtime: str
    chunks: int
    digest: str
    deleted: bool = False
    metadata: dict[str, str] = {}
    """The layout's room for what clients add; ours, the bytes of a small object once more."""

    @classmethod
    def describe(
        cls, name: str, bucket: str, data: bytes, own_digest: str, num_chunks: int
    ) -> Self:
        """Describe an object that is about to be stored, under chunks of its own."""
        return cls(
            name=name,
            bucket=bucket,
            nuid=secrets.token_hex(11),
            size=len(data),
            mtime=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            chunks=num_chunks,
            digest=own_digest,
            metadata={_DATA: base64.b64encode(data).decode()} if len(data) <= SMALL_BYTES else {},
        )

    @property
    def data(self) -> bytes | None:
        """Return the bytes, where they are here; their digest is not checked.

        Raises:
            CorruptDataError: not base64.

        """
        if (text := self.metadata.get(_DATA)) is None:
            return None
        try:
            return base64.b64decode(text, validate=True)
        except CodecError as error:
            raise CorruptDataError(f"object {self.name!r}: its bytes: {error}") from error

    def encode(self) -> bytes:
        """Return the JSON."""
        return msgspec.json.encode(self)


def decode_info(data: bytes) -> ObjectInfo:
    """Read the JSON.

    Raises:
        CorruptDataError: it is none, or lacks a field.

    """
    try:
        return parse_json(data, ObjectInfo, "description")
    except CodecError as error:
        raise CorruptDataError(f"not the description of an object: {error}") from error


def digest(data: bytes | memoryview) -> str:
    """Return the digest of an object's bytes, as it is written there."""
    return f"SHA-256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()}"


def encode_name(name: str) -> str:
    """Return the subject token of an object's name."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def decode_name(token: str) -> str:
    """Return the name of a subject token."""
    return base64.urlsafe_b64decode(token).decode()
