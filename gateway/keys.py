"""Bearer keys: only their SHA-256 is kept, and events name a key by its id.

A keys file, TOML:
```
[[tenants]]                  # optional; what it withholds, none of its keys has
tenant = "acme"
training_consent = false

[[keys]]
key_id = "acme-ide"
key_hash = "<SHA-256 of the key, in hex>"
tenant = "acme"              # default: the key's own id
storage_consent = true       # without it only counts are stored
training_consent = true
operator = true              # may see the live page, which shows all tenants
```

The keys file, read again when it changes: no restart, and no key that stays by mistake.

A file that is wrong, or gone, changes nothing: the keys before it stay, and the log says why.
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

_NAME = msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One customer: keys that share ids of feedback, and may judge each other's requests."""

    tenant: Annotated[str, _NAME]
    storage_consent: bool = True
    """False: none of its keys has it."""
    training_consent: bool = True
    """False: none of its keys has it."""


class KeySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bearer key and what its holder may do."""

    key_id: Annotated[str, _NAME]
    """Name of the key in events and metrics."""
    key_hash: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the key, in lower-case hex."""
    tenant: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,64}\Z")] = ""
    """Whose key it is; default: the key is a tenant of its own, named like it."""
    storage_consent: bool = False
    """Whether prompts, replies and comments of this key may be stored; else only counts are."""
    training_consent: bool = False
    """Whether requests and feedback of this key may become training data."""
    explores: bool = False
    """Whether requests at temperature 0, which nothing can be learned from, are sampled at
    `gateway.explore_temperature` instead; their replies say so."""
    summarizes: bool = False
    """Whether sessions of this key that outgrow the window go on from summaries; their replies say
    so. A request may ask for it by its header `X-Penstock-Summaries: auto`, too."""
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
    operator: bool = False
    """May see the page, the state and the metrics of the run: what all tenants do."""
    is_trusted: bool = False
    """May give feedback on requests of other tenants."""

    def __post_init__(self) -> None:
        """Fill in the tenant, and check fields against each other.

        Raises:
            ConfigError: Training without storage.

        """
        if not self.tenant:
            msgspec.structs.force_setattr(self, "tenant", self.key_id)
        if self.training_consent and not self.storage_consent:
            text = "expected storage_consent = true with it: what is trained is stored"
            raise ConfigError(f"keys.{self.key_id}.training_consent: {text}")


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


def create_key(path: Path, *, key_id: str, has_consent: bool = False) -> KeySpec:
    """Return the operator's key kept at `path` (mode 0600), made first if the file is absent.

    Args:
        path: The file; of several processes that make it at once, one does.
        key_id: Names the key.
        has_consent: To storage and to training.

    """
    if not path.exists():
        secret = f"psk-{secrets.token_urlsafe(32)}\n".encode()
        with contextlib.suppress(FileExistsError):
            write_atomic(path, secret, is_exclusive=True)
    return KeySpec(
        key_id=key_id,
        key_hash=hash_key(path.read_text().strip()),
        storage_consent=has_consent,
        training_consent=has_consent,
        operator=True,
    )


def load_keys(path: Path) -> list[KeySpec]:
    """Read a keys file; keys come without the consents that their tenants withhold.

    Raises:
        ConfigError: Not TOML, a field is unknown, missing or wrong, or a tenant is given twice; the
            text gives its path.
        FileNotFoundError: No such file.

    """
    try:
        table = parse_toml(path.read_text(), str(path))
        found = msgspec.convert(table, _KeysFile)
    except (CodecError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    tenants = {tenant.tenant: tenant for tenant in found.tenants}
    if len(tenants) < len(found.tenants):
        raise ConfigError(f"{path}: tenants: one is given twice")
    return [_withheld(key, tenants.get(key.tenant)) for key in found.keys]


def _withheld(key: KeySpec, tenant: TenantSpec | None) -> KeySpec:
    """Return a key without the consents that its tenant withholds."""
    if tenant is None:
        return key
    may_store = key.storage_consent and tenant.storage_consent
    may_train = key.training_consent and tenant.training_consent and may_store
    return msgspec.structs.replace(key, storage_consent=may_store, training_consent=may_train)


class _KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: list[KeySpec]
    tenants: list[TenantSpec] = []


log = logging.getLogger(__name__)

Stamp = tuple[int, int, int] | None


class KeysFile:
    """The keys that a gateway makes itself, and those of a file."""

    def __init__(self, own: Sequence[KeySpec], path: str) -> None:
        """Read the file.

        Args:
            own: Keys that no file has.
            path: TOML file of further keys; "" for none.

        Raises:
            ConfigError: A key is wrong; see `KeyRing`.
            FileNotFoundError: No such file.

        """
        self._own = own
        self._path = Path(path) if path else None
        self._stamp = self._read_stamp()
        self.ring = self._read()

    def reload(self) -> bool:
        """Read the file again if it changed; return whether there are new keys."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # Before reading: what changes meanwhile is read the next time.
        try:
            self.ring = self._read()
        except (ConfigError, OSError) as error:
            log.error("gateway.keys_file: %s; the keys stay as they were", error)  # noqa: TRY400
            return False
        log.info("gateway.keys_file: %s read again", self._path)
        return True

    def _read_stamp(self) -> Stamp:
        """Return what changes when the file does; None while there is none."""
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> KeyRing:
        further = [] if self._path is None else load_keys(self._path)
        return KeyRing([*self._own, *further])
