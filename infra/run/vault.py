"""A run's vault: users' content keys in its store, under the master key in its folder."""

from penstock.actors.runtime.files import create_secret
from penstock.actors.runtime.vault import Vault
from penstock.infra.run.runs import RunDir


def open_vault(run: RunDir) -> Vault:
    """Return the vault; every host of a run has the same `master_key` file.

    Raises:
        ConfigError: The file holds no key, or `[store]` is wrong.

    """
    return Vault(run.store(), create_secret(run.master_key))
