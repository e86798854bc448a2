"""From the table `[store]` of a run's configuration to its object store."""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.infra.bus.jetstream.access import Access
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.lazy import LazyJetStreamStore
from penstock.infra.stores.s3 import S3Store
from penstock.infra.stores.settings import StoreKind, StoreSection
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError, StoreUnreachableError
from penstock.messages.reading.parsing import parse_toml

Section = TypeVar("Section", bound=msgspec.Struct)


def open_store(
    config: Path, folder: Path, run_id: str, where: Callable[[], str | Access]
) -> ObjectStore:
    """Open a run's object store; nothing is sent yet.

    Args:
        config: the run's TOML file; absent: all defaults.
        folder: where a directory store lies.
        run_id: keeps runs apart that share a server or a bucket.
        where: returns what to connect to for the run's NATS server, when it is needed.

    Raises:
        ConfigError: a wrong table, or an extra that is not installed.

    """
    section = read_section(read_file(config), str(config), "store", StoreSection)
    match section.kind:
        case StoreKind.DIRECTORY:
            return DirectoryStore(folder)
        case StoreKind.JETSTREAM:
            return LazyJetStreamStore(where, section.bucket or run_id)
        case StoreKind.S3:
            return S3Store.open(section.bucket, prefix=run_id, endpoint=section.endpoint)


def read_file(config: Path) -> dict[str, Any]:
    """Return the tables of a run's TOML file; absent: none.

    Raises:
        ConfigError: not TOML.

    """
    try:
        return parse_toml(config.read_text(), str(config))
    except FileNotFoundError:
        return {}
    except ValueError as error:  # Not TOML, or not UTF-8.
        raise ConfigError(str(error)) from error


def read_section(data: dict[str, Any], source: str, name: str, section: type[Section]) -> Section:
    """Return one table of a configuration; absent: all defaults.

    Raises:
        ConfigError: a wrong table.

    """
    try:
        return msgspec.convert(data.get(name, {}), section)
    except ValueError as error:
        raise ConfigError(f"{source}: {name}: {error}") from error


_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_PREFIX = "penstock-check"
"""A prefix without objects, so that the reply is short."""
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED = {"401", "403"}


def check_store(section: StoreSection, field: str = "store") -> None:
    """Ask an S3 server for what a run needs: list, put once, get, delete; others are the run's own.

    Args:
        section: the store's settings.
        field: where they are in the configuration, for error texts.

    Raises:
        ConfigError: credentials, bucket or endpoint are missing or wrong, the bucket refuses an
            operation, or the extra is not installed.

    """
    if section.kind is not StoreKind.S3:
        return
    if section.endpoint:  # Elsewhere credentials may come from the machine's role.
        missing = [name for name in _CREDENTIALS if not os.environ.get(name)]
        if missing:
            raise ConfigError(f"{field}: expected {' and '.join(missing)} in the environment")
    store = S3Store.open(section.bucket, prefix=_PREFIX, endpoint=section.endpoint, patience_s=0.0)
    key = secrets.token_hex(8)
    for operation, act in (
        ("list", store.probe),
        ("put", lambda: store.probe_put(key)),
        ("get", lambda: store.probe_get(key)),
        ("delete", lambda: store.probe_delete(key)),
    ):
        try:
            act()
        except StoreUnreachableError as error:
            raise ConfigError(_cause(section, field, operation, str(error))) from error


def _cause(section: StoreSection, field: str, operation: str, text: str) -> str:
    found = _STATUS.search(text)
    status = found.group(1) if found else ""
    where = section.endpoint or "Amazon S3"
    if status in _REFUSED:
        return (
            f"{field}.bucket: {where} refuses to {operation} in {section.bucket!r} with "
            f"{' and '.join(_CREDENTIALS)}: expected credentials that may list, get, put and "
            f"delete: {text}"
        )
    if status == "404":
        return f"{field}.bucket: {where} has no bucket {section.bucket!r}; create it first"
    return f"{field}.endpoint: {where} does not answer as S3 does to {operation}: {text}"
