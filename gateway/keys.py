"""Bearer keys: only their SHA-256 is kept, and events name a key by its id."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.actors.runtime.files import write_atomic
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.settings import PositiveInt


class KeySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bearer key and what its holder may do."""

    key_id: str
    """Name of the key in events and metrics."""
    key_hash: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the key, in lower-case hex."""
    training_consent: bool = False
    """Whether requests and feedback of this key may become training data."""
    rpm_limit: PositiveInt = 600
    """Requests per minute."""
    tpm_limit: PositiveInt = 600_000
    """Prompt and reply tokens per minute."""
    max_parallel_requests: PositiveInt = 16
    feedback_rpm_limit: PositiveInt = 1200
    """Pieces of feedback per minute."""
    user_feedback_rpm_limit: PositiveInt = 120
    """Pieces of feedback per minute on the requests of one of its users."""
    feedback_kib_limit: PositiveInt = 256
    """Feedback per minute in KiB, comments and corrections included."""
    is_trusted: bool = False
    """May give feedback on requests of other keys."""


class KeyRing:
    """Finds the key of an `Authorization` header."""

    def __init__(self, keys: Iterable[KeySpec]) -> None:
        """Index the keys.

        Raises:
            ConfigError: Two keys share an id or a hash.

        """
        self._by_hash: dict[str, KeySpec] = {}
        ids: set[str] = set()
        for key in keys:
            if key.key_id in ids or key.key_hash in self._by_hash:
                raise ConfigError(f"keys.{key.key_id}: id or hash is given twice")
            ids.add(key.key_id)
            self._by_hash[key.key_hash] = key

    def find(self, authorization: str) -> KeySpec | None:
        """Return the key of a header `Bearer <key>`, or None."""
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret:
            return None
        digest = hash_key(secret.strip())
        key = self._by_hash.get(digest)
        return key if key and hmac.compare_digest(key.key_hash, digest) else None


def hash_key(secret: str) -> str:
    """Return the SHA-256 of a key in hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def create_key(path: Path, *, key_id: str, training_consent: bool = False) -> KeySpec:
    """Return the key kept at `path` (mode 0600), made there first if the file is absent."""
    try:
        secret = path.read_text().strip()
    except FileNotFoundError:
        secret = f"psk-{secrets.token_urlsafe(32)}"
        write_atomic(path, f"{secret}\n".encode(), mode=0o600)
    return KeySpec(key_id=key_id, key_hash=hash_key(secret), training_consent=training_consent)


def load_keys(path: Path) -> list[KeySpec]:
    """Read a TOML file with one `[[keys]]` table per key.

    Raises:
        ConfigError: Not TOML, or a field is unknown, missing or wrong; the text gives its path.
        FileNotFoundError: No such file.

    """
    try:
        table = parse_toml(path.read_text(), str(path))
        return msgspec.convert(table, _KeysFile).keys
    except (CodecError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error


class _KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: list[KeySpec]
