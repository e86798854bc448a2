"""Records that the log has not taken yet: one file each, private, complete or absent."""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.actors.runtime.files import private_folder, write_atomic
from penstock.messages.base import Message
from penstock.messages.codec import decode, encode
from penstock.messages.errors import CodecError, QueueFullError
from penstock.messages.feedback import InferenceRecorded

log = logging.getLogger(__name__)
_SUFFIX = ".record"
_LEFTOVER_S = 3600.0


class Spool:
    """A folder of records; several gateways may share it."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Count what an earlier process left.

        Args:
            folder: Made where it is absent, for its owner alone.
            bytes_max: Of all records together.

        """
        private_folder(folder)
        self._folder = folder
        self._bytes_max = bytes_max
        self._num_bytes = 0
        for path in folder.glob(".*"):  # What a write left that was killed.
            with suppress(FileNotFoundError):  # Another gateway was first, here and below.
                if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                    path.unlink()
        self.count()

    @property
    def is_empty(self) -> bool:
        """Whether no record waits."""
        return self._num_bytes == 0

    @property
    def is_full(self) -> bool:
        """Whether no further request should be taken on."""
        return self._num_bytes >= self._bytes_max

    def count(self) -> None:
        """Count the records that wait."""
        num_bytes = 0
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                num_bytes += path.stat().st_size
        self._num_bytes = num_bytes

    def put(self, name: str, record: Message) -> None:
        """Keep a record; it survives a crash from here on.

        Raises:
            QueueFullError: There is no room for it.
            OSError: e.g. the disk is full.

        """
        data = encode(record)
        if self._num_bytes + len(data) > self._bytes_max:
            raise QueueFullError(f"spool: expected at most {self._bytes_max} bytes of records")
        write_atomic(self._folder / f"{time.time_ns():020d}-{name}{_SUFFIX}", data)
        self._num_bytes += len(data)

    def waiting(self) -> Iterator[tuple[Path, Message]]:
        """Yield the records that wait, oldest first; one that cannot be read is set aside."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                yield path, decode(path.read_bytes())
            except FileNotFoundError:
                continue
            except (CodecError, OSError) as error:
                self.set_aside(path, error)

    def set_aside(self, path: Path, cause: Exception) -> None:
        """Let a record go that can never be on the log; its file stays, as `.bad`."""
        log.error("%s is set aside: %s", path.name, cause)
        with suppress(OSError):
            path.replace(path.with_suffix(".bad"))

    def erase(self, tenant: str, user: str) -> int:
        """Remove a user's records; return how many."""
        found = [
            path
            for path, record in self.waiting()
            if isinstance(record, InferenceRecorded)
            and (record.tenant, record.user) == (tenant, user)
        ]
        for path in found:
            self.remove(path)
        return len(found)

    def remove(self, path: Path) -> None:
        """Let a record go that is on the log."""
        with suppress(FileNotFoundError):
            self._num_bytes = max(0, self._num_bytes - path.stat().st_size)
            path.unlink()
