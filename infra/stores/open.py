"""From the table `[store]` of a run's configuration to its object store."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.lazy import LazyJetStreamStore
from penstock.infra.stores.s3 import S3Store
from penstock.infra.stores.settings import StoreKind, StoreSection
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError


def open_store(config: Path, folder: Path, run_id: str, url: Callable[[], str]) -> ObjectStore:
    """Open a run's object store; nothing is sent yet.

    Args:
        config: the run's TOML file; absent: all defaults.
        folder: where a directory store lies.
        run_id: keeps runs apart that share a server or a bucket.
        url: tells the run's NATS server, when it is needed.

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
