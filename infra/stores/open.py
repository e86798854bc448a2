"""From the table `[store]` of a run's configuration to its object store."""

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.lazy import LazyJetStreamStore
from penstock.infra.stores.s3 import S3Store
from penstock.infra.stores.settings import StoreKind, StoreSection
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError, StoreUnreachableError


def open_store(config: Path, folder: Path, run_id: str, url: Callable[[], str]) -> ObjectStore:
    """Open a run's object store; nothing is sent yet.

    Args:
        config: the run's TOML file; absent: all defaults.
        folder: where a directory store lies.
        run_id: keeps runs apart that share a server or a bucket.
        url: returns the address of the run's NATS server, when it is needed.

    Raises:
        ConfigError: a wrong table, or an extra that is not installed.

    """
    section = _read_section(config)
    match section.kind:
        case StoreKind.DIRECTORY:
            return DirectoryStore(folder)
        case StoreKind.JETSTREAM:
            return LazyJetStreamStore(url, section.bucket or run_id)
        case StoreKind.S3:
            return S3Store.open(section.bucket, prefix=run_id, endpoint=section.endpoint)


def _read_section(config: Path) -> StoreSection:
    try:
        table = tomllib.loads(config.read_text()).get("store", {})
        return msgspec.convert(table, StoreSection)
    except FileNotFoundError:
        return StoreSection()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{config}: store: {error}") from error


_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_PREFIX = "penstock-check"
"""A prefix without objects, so that the reply is short."""
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED = {"401", "403"}


def check_store(section: StoreSection) -> None:
    """Ask an S3 server for one page of its keys; the other kinds are the run's own.

    Raises:
        ConfigError: credentials, `store.bucket` or `store.endpoint` are missing or wrong, or the
            extra is not installed.

    """
    if section.kind is not StoreKind.S3:
        return
    if section.endpoint:  # Elsewhere credentials may come from the machine's role.
        missing = [name for name in _CREDENTIALS if not os.environ.get(name)]
        if missing:
            raise ConfigError(f"store.kind s3: expected {' and '.join(missing)} in the environment")
    store = S3Store.open(section.bucket, prefix=_PREFIX, endpoint=section.endpoint, patience_s=0.0)
    try:
        store.probe()
    except StoreUnreachableError as error:
        raise ConfigError(_cause(section, str(error))) from error


def _cause(section: StoreSection, text: str) -> str:
    found = _STATUS.search(text)
    status = found.group(1) if found else ""
    where = section.endpoint or "Amazon S3"
    if status in _REFUSED:
        return f"{' and '.join(_CREDENTIALS)}: {where} refuses them: {text}"
    if status == "404":
        return f"store.bucket: {where} has no bucket {section.bucket!r}; create it first"
    return f"store.endpoint: {where} does not answer as S3 does: {text}"
