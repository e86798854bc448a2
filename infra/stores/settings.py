"""Settings of the object store of a run: the table `[store]` of its configuration."""

from enum import StrEnum
from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import PlainText, check_encrypted

BUCKET = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?\Z"
ENDPOINT = r"^(https?://[A-Za-z0-9.\-\[\]:]+(/[A-Za-z0-9._~/-]*)?)?\Z"


class StoreKind(StrEnum):
    """Kind of object store; each passes `tests/contract/stores/check_store.py`."""

    DIRECTORY = "directory"
    """Folder of the run, on a local or a shared file system."""
    JETSTREAM = "jetstream"
    """Bucket on the NATS server of the run."""
    S3 = "s3"
    """Bucket of S3 or a compatible service; needs the extra `s3`."""


class StoreSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the origin store; each region has its own store next to its relay."""

    kind: StoreKind = StoreKind.DIRECTORY
    bucket: Annotated[str, msgspec.Meta(pattern=BUCKET)] = ""
    """S3: the bucket, which must exist. JetStream: empty for one named after the run."""
    endpoint: Annotated[str, msgspec.Meta(pattern=ENDPOINT)] = ""
    """S3: a server other than Amazon's. Credentials come from the environment."""
    allow_plain_text: PlainText = []
    """Hosts off this machine whose `endpoint` may be `http://`."""
    retain_for_replay: bool = True
    """Keep every version for ever. Replaying needs none of them: it starts from the checkpoint of
    version 0. But any version can then be rebuilt, and compared, and a region joined from nothing.
    Otherwise the compactor keeps the origin as short as relays keep their regions, back to the
    oldest checkpoint."""

    master_key_file: str = ""
    """File with the key that wraps users' content keys, 64 hexadecimal digits; every host has the
    same one. Empty: `master_key` in the run's folder, made there."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.kind is StoreKind.S3 and not self.bucket:
            raise ConfigError("store.bucket: kind s3 needs one")
        if self.kind is StoreKind.DIRECTORY and (self.bucket or self.endpoint):
            raise ConfigError("store: bucket and endpoint are for kinds jetstream and s3")
        if self.endpoint:
            check_encrypted("store.endpoint", self.endpoint, self.allow_plain_text)
