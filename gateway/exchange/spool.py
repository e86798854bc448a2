"""Records that wait on disk for the log: one private file each, complete or absent."""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.actors.runtime.files import private_folder, write_atomic
from penstock.actors.runtime.vault import Vault
from penstock.messages.base import Message
from penstock.messages.codec import decode, encode
from penstock.messages.errors import CodecError, QueueFullError
from penstock.messages.feedback import InferenceRecorded
from penstock.messages.reading.sealed import SealedTurn

log = logging.getLogger(__name__)
_SUFFIX = ".record"
_BAD_SUFFIX = ".bad"
BAD_S_MAX = 7 * 86_400.0
"""Age in seconds after which a record that was set aside is removed."""
_LEFTOVER_S = 3600.0
"""Age in seconds after which a temporary file belongs to a dead process, not to a slow write."""


class Spool:
    """A folder of records; several gateways may share it."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Open the folder and count the records of earlier processes.

        Args:
            folder: Folder of the records; created with access for its owner only.
            bytes_max: Maximum size of all records together.

        """
        private_folder(folder)
        self._folder = folder
        self._bytes_max = bytes_max
        self._num_bytes = 0
        # Temporary files begin with a dot: a process that was killed while it wrote left them.
        for path in folder.glob(".*"):
            # Here and below: another gateway may have removed the file first.
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                    path.unlink()
        self.count()
        if self._num_bytes:
            log.info("%d bytes of records wait in %s for the log", self._num_bytes, folder)

    @property
    def is_empty(self) -> bool:
        """Whether no record waits."""
        return self._num_bytes == 0

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more records."""
        return self._num_bytes >= self._bytes_max

    def count(self) -> None:
        """Measure the records in the folder, which other gateways may have changed."""
        for path in self._folder.glob(f"*{_BAD_SUFFIX}"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > BAD_S_MAX:
                    path.unlink()
        num_bytes = 0
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                num_bytes += path.stat().st_size
        self._num_bytes = num_bytes

    def put(self, name: str, record: Message) -> None:
        """Store a record durably: it survives a crash once this returns.

        Raises:
            QueueFullError: There is no room for the record.
            OSError: The file cannot be written, e.g. because the disk is full.

        """
        data = encode(record)
        # By this gateway's count: others that share the folder may exceed it by what they add.
        if self._num_bytes + len(data) > self._bytes_max:
            raise QueueFullError(f"spool: expected at most {self._bytes_max} bytes of records")
        # Named by time: sorted names are the order in which records came.
        write_atomic(self._folder / f"{time.time_ns():020d}-{name}{_SUFFIX}", data)
        self._num_bytes += len(data)

    def waiting(self) -> Iterator[tuple[Path, Message]]:
        """Yield the waiting records with their paths, oldest first; set unreadable ones aside."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                yield path, decode(path.read_bytes())
            except FileNotFoundError:
                continue
            except (CodecError, OSError) as error:
                self.set_aside(path, error)

    def set_aside(self, path: Path, cause: Exception) -> None:
        """Rename a record that the log can never accept to `.bad`, for a person to look at.

        It is removed after `BAD_S_MAX`: whose it is may be unreadable, so no erasure would find it.
        """
        log.error("record %s in the spool cannot be published, kept as .bad: %s", path.name, cause)
        with suppress(OSError):
            path.replace(path.with_suffix(_BAD_SUFFIX))

    def erase(self, tenant: str, user: str, erasures: int) -> int:
        """Remove what came from a user before an erasure; return how many records it was.

        Args:
            tenant: Tenant of the user.
            user: Pseudonym.
            erasures: Erasures of the user, this one included.

        """
        num = 0
        # Also those set aside: they are sealed under the service's own key, which stays.
        for path in [*self._folder.glob(f"*{_SUFFIX}"), *self._folder.glob(f"*{_BAD_SUFFIX}")]:
            with suppress(CodecError, OSError):
                record = decode(path.read_bytes())
                if (
                    isinstance(record, InferenceRecorded)
                    and (record.tenant, record.user) == (tenant, user)
                    and isinstance(record.turn, SealedTurn)
                    and Vault.since(record.turn.sealed) < erasures
                ):
                    self.remove(path)
                    num += 1
        return num

    def remove(self, path: Path) -> None:
        """Remove a record that the log has, or that must be erased."""
        with suppress(FileNotFoundError):
            num_bytes = path.stat().st_size if path.suffix == _SUFFIX else 0
            self._num_bytes = max(0, self._num_bytes - num_bytes)
            path.unlink()
