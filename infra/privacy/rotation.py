"""Rotates the master key: users' keys are wrapped again, and their content stays unchanged.

```
 1. every host gets the file with the new key and the previous one; restart
 2. `rotate` wraps each user's key with the new one; it can be repeated after a crash
 3. every host gets the file without the previous key; restart
```
From the first rotation on, pseudonyms have a separate key, so users keep theirs. Spools are read
under both keys between steps 1 and 3.
"""

import argparse
import asyncio
from pathlib import Path

from penstock.actors.runtime.files import read_secret, write_atomic
from penstock.actors.runtime.vault import Vault, rotated_keys, settled_keys
from penstock.infra.output import print_line
from penstock.infra.run.runs import RunDir, master_key_file, open_vault
from penstock.messages.errors import ConfigError

_LINE_BYTES = 32


def begin_rotation(path: Path) -> None:
    """Write a new master key into a file, before the current one.

    Raises:
        ConfigError: A rotation of this file is in progress.

    """
    secret = read_secret(path)
    if len(secret) > 2 * _LINE_BYTES:
        raise ConfigError(f"{path}: a rotation has begun: end it first")
    _write(path, rotated_keys(secret))


async def rotate(vault: Vault) -> int:
    """Wrap all users' keys with the new master key; return how many needed it."""
    return await vault.rewrap()


async def end_rotation(path: Path, vault: Vault) -> None:
    """Remove the previous master key from a file.

    Raises:
        ConfigError: A user's key is still wrapped with it.

    """
    if num := await vault.rewrap():
        raise ConfigError(f"{path}: {num} keys were still wrapped under the key before: try again")
    _write(path, settled_keys(read_secret(path)))


def _write(path: Path, secret: bytes) -> None:
    lines = [secret[at : at + _LINE_BYTES].hex() for at in range(0, len(secret), _LINE_BYTES)]
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())


def main() -> None:
    """Execute one step of a rotation: `begin RUN`, `rewrap RUN`, `end RUN`."""
    parser = argparse.ArgumentParser(prog="python -m penstock.infra.privacy.rotation")
    parser.add_argument("step", choices=("begin", "rewrap", "end"))
    parser.add_argument("run", type=Path, help="folder of the run")
    arguments = parser.parse_args()
    run = RunDir(arguments.run)
    path = master_key_file(run)
    if arguments.step == "begin":
        begin_rotation(path)
        print_line(f"{path}: a new key; give the file to every host, restart, then: rewrap")
    elif arguments.step == "rewrap":
        print_line(f"{asyncio.run(rotate(open_vault(run)))} users' keys wrapped again; then: end")
    else:
        asyncio.run(end_rotation(path, open_vault(run)))
        print_line(f"{path}: the key before is gone; give the file to every host")


if __name__ == "__main__":
    main()
