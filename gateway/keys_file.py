"""The keys file, read again when it changes: no restart, and no key that stays by mistake.

A file that is wrong, or gone, changes nothing: the keys before it stay, and the log says why.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.gateway.keys import KeyRing, KeySpec, load_keys
from penstock.messages.errors import ConfigError

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
