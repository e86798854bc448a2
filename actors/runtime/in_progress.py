"""A record of what a process is working on, readable by the launcher after the process died.

```
 handler or service ──noted(item)──▶ slot in a mapped file ──process dies──▶ launcher reads suspects
```
A write to mapped memory costs a microsecond and survives even kill -9, because the kernel owns the
page. Items are named `<role>.<message type>.<key>` (see `ItemCharged`).
"""

import asyncio
import contextlib
import mmap
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import msgspec

from penstock.actors.runtime.files import open_private, private_folder
from penstock.messages.base import Event, Message
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.generation import Generate
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.rollout import RolloutFinished
from penstock.messages.sandbox import ExecCommand, ListFiles, ReadFile, WriteFiles
from penstock.messages.streams import check_token
from penstock.messages.task import StartRollout

NUM_SLOTS = 512
"""Number of items that can be noted by name at once; further ones are noted as `UNNAMED`."""
SLOT_BYTES = 1024
_LENGTH_BYTES = 2
UNNAMED = "unnamed"
"""Placeholder for items that found no free slot or whose name is too long for one. Such an item may
have caused the death, so no named item can be proven to have."""


class NotedItem(msgspec.Struct, frozen=True):
    """An item in progress."""

    item: str
    task_id: str = ""


def event_item(role: str, event: Event) -> str:
    """Return the item name of an event that a role handles."""
    return f"{role}.{type(event).__name__}.{event.key()}"


def task_of(event: Event) -> str:
    """Return the id of the task that an event concerns; empty if there is none."""
    if isinstance(event, StartRollout):
        return event.task.task_id
    return event.task_id if isinstance(event, RolloutFinished) else ""


def generate_item(request_id: str) -> str:
    """Return the item name of a request to a generator, the same for all its attempts."""
    return f"generator.Generate.{request_id}"


def request_item(message: Message) -> str:
    """Return the item name of a request; empty for a request that is never charged with a death."""
    if isinstance(message, Generate):
        # The suffix is the attempt's number: a retry on another replica is the same suspect.
        item = generate_item(message.request_id.rpartition(".")[0])
    elif isinstance(message, ExecCommand | WriteFiles | ReadFile | ListFiles):
        item = f"sandbox.{type(message).__name__}.{message.lease_id}"
    else:
        return ""
    try:
        return check_token(item, "item")
    except ConfigError:
        return ""


class InProgress:
    """The items in progress in this process.

    Args:
        path: The mapped file, emptied first; None keeps the items only in memory.

    """

    def __init__(self, path: Path | None = None) -> None:
        self._memory = _mapped(path)
        self._free = list(reversed(range(1, NUM_SLOTS + 1)))
        self._num_unnamed = 0
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.has_charged = False
        """Whether the failure that ends this process has already been charged to an item."""

    @contextlib.contextmanager
    def noted(self, item: str, task_id: str = "") -> Generator[None]:
        """Record an item as in progress during the block."""
        data = msgspec.msgpack.encode((item, task_id))
        slot = self._free.pop() if self._free and len(data) <= SLOT_BYTES - _LENGTH_BYTES else 0
        if slot:
            self._write(slot, data)
        else:
            self._count_unnamed(+1)
        try:
            yield
        finally:
            if slot:
                self._write(slot, b"")
                self._free.append(slot)
            else:
                self._count_unnamed(-1)

    def _count_unnamed(self, change: int) -> None:
        self._num_unnamed += change
        self._write(0, msgspec.msgpack.encode((UNNAMED, "")) if self._num_unnamed else b"")

    def _write(self, slot: int, data: bytes) -> None:
        start, first = slot * SLOT_BYTES, slot * SLOT_BYTES + _LENGTH_BYTES
        self._memory[first : first + len(data)] = data
        # The length last: a process killed in between leaves a slot that reads as unused.
        self._memory[start:first] = len(data).to_bytes(_LENGTH_BYTES, "little")

    def alone(self, kind: str) -> asyncio.Lock:
        """Return the lock under which suspects of one message type are handled, one at a time.

        With it, two deaths have at most one suspect in common, which is then proven guilty.
        """
        return self._alone[kind]

    def current(self) -> list[NotedItem]:
        """Return the items in progress."""
        return _items(self._memory[:])


def read_in_progress(path: Path) -> list[NotedItem]:
    """Return what a dead process had in progress; empty if there is no readable record."""
    try:
        return _items(path.read_bytes())
    except OSError:
        return []


def _mapped(path: Path | None) -> mmap.mmap:
    size = (NUM_SLOTS + 1) * SLOT_BYTES
    if path is None:
        return mmap.mmap(-1, size)
    private_folder(path.parent)
    with open_private(path, "w+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def _items(memory: bytes) -> list[NotedItem]:
    found: list[NotedItem] = []
    for start in range(0, len(memory), SLOT_BYTES):
        first = start + _LENGTH_BYTES
        length = int.from_bytes(memory[start:first], "little")
        if length:
            data = memory[first : first + length]
            # Best effort: one unreadable slot must not hide the others.
            with contextlib.suppress(CodecError):
                found.append(NotedItem(*parse_msgpack(data, tuple[str, str], "note")))
    return found
