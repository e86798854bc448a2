"""What a process works on, kept where the launcher finds it after the process died.

```
 handler or service ──noted(item)──▶ a slot of a mapped file ──process dies──▶ launcher: who was it?
```
A write to mapped memory costs a microsecond and survives even kill -9, since the kernel has the
page. Items are named `<role>.<message type>.<key>` (`ItemCharged`).
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
"""Items in progress at once; of further ones it is noted that they are there."""
SLOT_BYTES = 1024
_LENGTH_BYTES = 2
UNNAMED = "unnamed"
"""Stands for an item that found no slot, or whose name is too long for one: it may be the cause
of a death, so the others cannot be proven to be."""


class NotedItem(msgspec.Struct, frozen=True):
    """An item in progress."""

    item: str
    task_id: str = ""


def event_item(role: str, event: Event) -> str:
    """Return the name of an event as an item of a role's work."""
    return f"{role}.{type(event).__name__}.{event.key()}"


def task_of(event: Event) -> str:
    """Return the task that an event is about; empty if about none."""
    if isinstance(event, StartRollout):
        return event.task.task_id
    return event.task_id if isinstance(event, RolloutFinished) else ""


def generate_item(request_id: str) -> str:
    """Return the name of a request to a generator as an item, the same for all its attempts."""
    return f"generator.Generate.{request_id}"


def request_item(message: Message) -> str:
    """Return the name of a request as an item; empty for one that no death is charged to."""
    if isinstance(message, Generate):
        item = generate_item(message.request_id.rpartition(".")[0])  # Without the attempt.
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
        path: The mapped file, emptied first; None keeps them in this process's memory alone.

    """

    def __init__(self, path: Path | None = None) -> None:
        self._memory = _mapped(path)
        self._free = list(reversed(range(1, NUM_SLOTS + 1)))
        self._num_unnamed = 0
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.has_charged = False
        """Whether the failure that ends this process was charged to an item already."""

    @contextlib.contextmanager
    def noted(self, item: str, task_id: str = "") -> Generator[None]:
        """Note an item during the block."""
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
        # Last: a slot that says it is used is whole.
        self._memory[start:first] = len(data).to_bytes(_LENGTH_BYTES, "little")

    def alone(self, kind: str) -> asyncio.Lock:
        """Return what the suspects among messages of one type share: one is worked on at a time.

        So two deaths have at most one suspect in common.
        """
        return self._alone[kind]

    def current(self) -> list[NotedItem]:
        """Return the items in progress."""
        return _items(self._memory[:])


def read_in_progress(path: Path) -> list[NotedItem]:
    """Return what a process that is gone had in progress; nothing where it noted nothing."""
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
            with contextlib.suppress(CodecError):
                found.append(NotedItem(*parse_msgpack(data, tuple[str, str], "note")))
    return found
