"""A run's vault: users' content keys in its store, under the master key in its folder."""

from penstock.actors.runtime.vault import Vault
from penstock.infra.run.runs import RunDir


def open_vault(run: RunDir) -> Vault:
    """Return the vault.

    Raises:
        ConfigError: `[store]` is wrong, or its file holds no key.

    """
    return Vault(run.store(), run.master_key())
