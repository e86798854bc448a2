"""Bearer keys and the keys file. Only hashes of keys are kept; events name a key by its id.

A keys file is TOML:
```
[[tenants]]                  # optional; a consent withheld here is withheld from all its keys
tenant = "acme"
training_consent = false

[[keys]]
key_id = "acme-ide"
key_hash = "<SHA-256 of the key, in hex>"
tenant = "acme"              # default: the id of the key
storage_consent = true       # without it only counts are stored
training_consent = true
operator = true              # may see the live page, which shows all tenants
```

The gateway reloads the file when it changes, so keys are added and revoked without a restart. If
the file is invalid, the current keys stay valid and the log says why; if it is missing, none of its
keys is valid. A consent that is withdrawn holds for what was recorded before, too, as long as it is
not trained.
"""

import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.actors.runtime.files import write_atomic
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.settings import PositiveInt

log = logging.getLogger(__name__)

_NAME = msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One customer; its keys share feedback ids and may give feedback on each other's requests."""

    tenant: Annotated[str, _NAME]
    storage_consent: bool = True
    """Whether its keys may have storage consent."""
    training_consent: bool = True
    """Whether its keys may have training consent."""


class KeySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bearer key and the permissions of its holder."""

    key_id: Annotated[str, _NAME]
    """Name of the key in events and metrics."""
    key_hash: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the key, in lower-case hex."""
    tenant: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,64}\Z")] = ""
    """Tenant that owns the key; default: a tenant of the same name as the key."""
    storage_consent: bool = False
    """Whether prompts, replies and comments of this key may be stored; if not, only counts are."""
    training_consent: bool = False
    """Whether requests and feedback of this key may become training data."""
    explores: bool = False
    """Whether requests at temperature 0 are sampled at `gateway.explore_temperature` instead,
    because greedy replies cannot be trained; a reply header says so."""
    summarizes: bool = False
    """Whether sessions of this key that outgrow the context window continue from summaries; a reply
    header says so. Single requests opt in by the header `X-Penstock-Summaries: auto`."""
    rpm_limit: PositiveInt = 600
    """Requests per minute."""
    tpm_limit: PositiveInt = 600_000
    """Prompt and reply tokens per minute."""
    max_parallel_requests: PositiveInt = 16
    """Maximum requests in progress at once."""
    feedback_rpm_limit: PositiveInt = 1200
    """Pieces of feedback per minute."""
    user_feedback_rpm_limit: PositiveInt = 120
    """Pieces of feedback per minute by one of its users."""
    feedback_kib_limit: PositiveInt = 256
    """Feedback per minute in KiB, including comments and corrections."""
    operator: bool = False
    """Whether the holder may see the live page, state and metrics, which show all tenants."""
    is_trusted: bool = False
    """Whether the holder may give feedback on requests of other tenants."""

    def __post_init__(self) -> None:
        """Fill in the tenant and check the fields against each other.

        Raises:
            ConfigError: Training consent without storage consent.

        """
        if not self.tenant:
            msgspec.structs.force_setattr(self, "tenant", self.key_id)
        if self.training_consent and not self.storage_consent:
            text = "expected storage_consent = true as well: training data is stored"
            raise ConfigError(f"keys.{self.key_id}.training_consent: {text}")


class KeyRing:
    """Looks up keys by `Authorization` header."""

    def __init__(self, keys: Iterable[KeySpec]) -> None:
        """Index the keys.

        Raises:
            ConfigError: Two keys share an id or a hash.

        """
        self._by_hash: dict[str, KeySpec] = {}
        self.by_id: dict[str, KeySpec] = {}
        for key in keys:
            if key.key_id in self.by_id or key.key_hash in self._by_hash:
                raise ConfigError(f"keys.{key.key_id}: another key has the same key_id or key_hash")
            self.by_id[key.key_id] = key
            self._by_hash[key.key_hash] = key

    def find(self, authorization: str) -> KeySpec | None:
        """Return the key of a header `Bearer <key>`; None if it is unknown or malformed."""
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret:
            return None
        # The table lookup compares hashes, whose timing reveals nothing about the secret.
        digest = hash_key(secret.strip())
        key = self._by_hash.get(digest)
        return key if key and hmac.compare_digest(key.key_hash, digest) else None


def hash_key(secret: str) -> str:
    """Return the SHA-256 of a key in lower-case hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def create_key(path: Path, *, key_id: str, has_consent: bool = False) -> KeySpec:
    """Return the operator key stored at `path`; create the file with mode 0600 if needed.

    Args:
        path: File with the key in plain text.
        key_id: Id of the key in events and metrics.
        has_consent: Whether the key has storage and training consent.

    """
    if not path.exists():
        secret = f"psk-{secrets.token_urlsafe(32)}\n".encode()
        # Several gateways may start at once: one of them creates the file, all read its key.
        with contextlib.suppress(FileExistsError):
            write_atomic(path, secret, is_exclusive=True)
    return KeySpec(
        key_id=key_id,
        key_hash=hash_key(path.read_text().strip()),
        storage_consent=has_consent,
        training_consent=has_consent,
        operator=True,
    )


class _KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: list[KeySpec]
    tenants: list[TenantSpec] = []


def load_keys(path: Path) -> list[KeySpec]:
    """Return the keys of a keys file, less the consents that their tenants withhold.

    Raises:
        ConfigError: The file is not TOML, a field is unknown, missing or invalid, or a tenant is
            listed twice; the text names the file and the field.
        FileNotFoundError: The file does not exist.

    """
    found = _parse(path)
    tenants = {tenant.tenant: tenant for tenant in found.tenants}
    return [_restricted(key, tenants.get(key.tenant)) for key in found.keys]


def _parse(path: Path) -> _KeysFile:
    try:
        table = parse_toml(path.read_text(), str(path))
        found = msgspec.convert(table, _KeysFile)
    except (CodecError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if len({tenant.tenant for tenant in found.tenants}) < len(found.tenants):
        raise ConfigError(f"{path}: tenants: expected distinct names, found one twice")
    return found


def _restricted(key: KeySpec, tenant: TenantSpec | None) -> KeySpec:
    """Return a key without the consents that its tenant withholds."""
    if tenant is None:
        return key
    may_store = key.storage_consent and tenant.storage_consent
    # What trains is stored, so that withheld storage withholds training as well.
    may_train = key.training_consent and tenant.training_consent and may_store
    return msgspec.structs.replace(key, storage_consent=may_store, training_consent=may_train)


FileStamp = tuple[int, int, int] | None
"""Modification time in ns, size in bytes and inode of a file; None if it does not exist."""


class KeysFile:
    """The keys of the run together with those of a keys file, which is reloaded on change."""

    def __init__(self, own: Sequence[KeySpec], path: str) -> None:
        """Read the file.

        Args:
            own: Keys of the run, valid whatever the file says.
            path: Keys file; "" for none.

        Raises:
            ConfigError: A key is invalid; see `KeyRing` and `load_keys`.
            FileNotFoundError: The file does not exist.

        """
        self._own = own
        self._path = Path(path) if path else None
        self._stamp = self._read_stamp()
        self._tenants_withheld: list[str] = []
        self.ring = self._read()

    def reload(self) -> bool:
        """Reload the file if it changed; return whether the keys may have changed."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        # Before reading: a change during the read has another stamp, and is read the next time.
        self._stamp = stamp
        try:
            self.ring = self._read()
        except FileNotFoundError:
            # Not as with an invalid file: who removes it means to revoke its keys.
            log.error("gateway.keys_file: %s is gone: its keys are revoked", self._path)  # noqa: TRY400
            self.ring = KeyRing(self._own)
        except (ConfigError, OSError) as error:
            # No traceback: the text names the field. Dropping all keys would lock everybody out.
            log.error("gateway.keys_file: %s; the keys stay as they were", error)  # noqa: TRY400
            return False
        else:
            log.info("gateway.keys_file: reloaded %s", self._path)
        return True

    @property
    def stamp(self) -> str:
        """Version of the file."""
        return "-".join(map(str, self._stamp or ()))

    def withheld(self) -> list[tuple[str, str]]:
        """Return tenant and id of each key without consent to training; id "": all of a tenant."""
        keys = self.ring.by_id.values()
        found = [(key.tenant, key.key_id) for key in keys if not key.training_consent]
        return found + [(tenant, "") for tenant in self._tenants_withheld]

    def _read_stamp(self) -> FileStamp:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> KeyRing:
        if self._path is None:
            return KeyRing(self._own)
        ring = KeyRing([*self._own, *load_keys(self._path)])
        found = _parse(self._path)
        self._tenants_withheld = [
            one.tenant
            for one in found.tenants
            if not (one.training_consent and one.storage_consent)
        ]
        return ring
