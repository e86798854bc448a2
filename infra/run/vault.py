"""A run's vault: users' content keys in its store, under a master key that is in a file."""

from pathlib import Path

from penstock.actors.runtime.files import create_secret, read_secret
from penstock.actors.runtime.vault import Vault
from penstock.infra.run.runs import RunDir
from penstock.infra.stores.open import read_file, read_section
from penstock.infra.stores.settings import StoreSection
from penstock.messages.errors import ConfigError


def open_vault(run: RunDir) -> Vault:
    """Return the vault; raises as `master_key` does."""
    return Vault(run.store(), master_key(run))


def master_key(run: RunDir) -> bytes:
    """Return the secret that wraps content keys and makes pseudonyms, the same on every host.

    Raises:
        ConfigError: `[store]` is wrong, or the file that it names.

    """
    section = read_section(read_file(run.config), str(run.config), "store", StoreSection)
    if not section.master_key_file:
        return create_secret(run.path / "master_key")
    try:
        return read_secret(Path(section.master_key_file))
    except ConfigError as error:
        raise ConfigError(f"store.master_key_file: {error}") from error
