"""Opens and checks the object store that `[store]` of a configuration describes."""

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
    """Open the object store of a run without contacting a server yet.

    Args:
        config: TOML file of the run; if it is missing, all defaults apply.
        folder: Folder of a directory store.
        run_id: Id that separates runs which share a server or a bucket.
        where: Function that returns the NATS server of the run, called on first use.

    Raises:
        ConfigError: The table is wrong, or an extra is not installed.

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
    """Return the tables of a TOML file, none if the file is missing.

    Raises:
        ConfigError: The file is not valid TOML.

    """
    try:
        return parse_toml(config.read_text(), str(config))
    except FileNotFoundError:
        return {}
    except ValueError as error:  # Not TOML, or not UTF-8.
        raise ConfigError(str(error)) from error


def read_section(data: dict[str, Any], source: str, name: str, section: type[Section]) -> Section:
    """Return one table of a configuration, with all defaults if it is missing.

    Raises:
        ConfigError: The table is wrong.

    """
    try:
        return msgspec.convert(data.get(name, {}), section)
    except ValueError as error:
        raise ConfigError(f"{source}: {name}: {error}") from error


_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_PREFIX = "penstock-check"
"""Prefix without objects, so that the reply to a listing is short."""
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED = {"401", "403"}


def check_store(section: StoreSection, field: str = "store") -> None:
    """Try the operations of a run on an S3 bucket: list, put once, get, delete; skip other kinds.

    Args:
        section: Settings of the store.
        field: Path of the settings in the configuration, for error texts.

    Raises:
        ConfigError: Credentials, bucket or endpoint are missing or wrong, the bucket refuses an
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
