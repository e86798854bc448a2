"""A QEMU guest's memory: a file in memory that its copies map privately.

```
 base     a sealed memfd: all that a machine's memory held when it was saved
   └─ a copy maps it privately; what it writes becomes a page of its own
         └─ saved again: a new memfd with the base's pages, and the copy's own over them
```
The host finds a process's own pages in `/proc/PID/pagemap` and reads them through `/proc/PID/mem`:
a machine that is saved is paused for as long as its own pages take to copy.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from penstock.envs.microvm.checkpoint import MEMORY, STATE
from penstock.envs.microvm.host_process import process_tree
from penstock.envs.microvm.protocol import LineState
from penstock.envs.sandbox import SandboxDied, SandboxFileError

PAGE = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10
"""0x10: F_SEAL_FUTURE_WRITE, which lets copies map it privately and nobody change it."""
_PRESENT_OR_SWAPPED = np.uint64(3 << 62)
_OF_A_FILE = np.uint64(1 << 61)


class Memory:
    """A guest's memory; freed when this object and all mappings are gone.

    Raises:
        SandboxDied: The host has no room for it.

    """

    fd = -1

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        try:
            self.fd = os.memfd_create("guest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, num_bytes)
        except OSError as error:
            raise SandboxDied(f"no memory for a machine: {error}") from error

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def seal(self) -> None:
        """Forbid all further changes."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)


def copy_data(source: int, target: int) -> None:
    """Copy one file's content into another, empty one; holes stay holes."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, end in _data(source, size):
        at = os.lseek(target, start, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(target, source, at, end - at)
            if sent == 0:
                raise OSError(f"the file ended at {at} of {end} bytes")
            at += sent


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield where a file has content, from and to."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


class Mapping(msgspec.Struct, frozen=True):
    """Where a process maps a memory: (address, offset in the memory, bytes) of each part."""

    pid: int
    parts: list[tuple[int, int, int]]


def find_mapping(pid: int, memory: Memory) -> Mapping:
    """Return where a process, or one that it started, maps a memory.

    Raises:
        SandboxDied: None does, or this process may not read its maps.

    """
    inode = str(os.fstat(memory.fd).st_ino)
    try:
        for candidate in process_tree(pid):
            lines = Path(f"/proc/{candidate}/maps").read_text().splitlines()
            fields = [line.split(maxsplit=5) for line in lines]
            parts = [_part(*f[:3]) for f in fields if f[4] == inode and "memfd:" in f[-1]]
            if parts:
                return Mapping(candidate, parts)
    except OSError as error:
        raise SandboxDied(f"the memory of process {pid} cannot be read: {error}") from error
    raise SandboxDied(f"process {pid} holds no guest's memory")


def _part(addresses: str, _: str, offset: str) -> tuple[int, int, int]:
    start, end = (int(text, 16) for text in addresses.split("-"))
    return start, int(offset, 16), end - start


def copy_own_pages(mapping: Mapping, target: Memory) -> None:
    """Copy a process's own pages of a memory to their places in `target`.

    Raises:
        SandboxDied: The process ended.

    """
    folder = Path(f"/proc/{mapping.pid}")
    try:
        with (
            (folder / "pagemap").open("rb", buffering=0) as pagemap,
            (folder / "mem").open("rb", buffering=0) as source,
            mmap.mmap(target.fd, target.num_bytes) as mapped,
            memoryview(mapped) as whole,
        ):
            for address, offset, num_bytes in mapping.parts:
                for first, last in _own_ranges(pagemap.fileno(), address, num_bytes):
                    part = slice(offset + first, offset + last)
                    _read_whole(source.fileno(), whole, part, address + first)
    except OSError as error:
        raise SandboxDied(f"the guest's memory cannot be read: {error}") from error


def _own_ranges(pagemap: int, address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of pages that are the process's own, in bytes from `address`."""
    raw = os.pread(pagemap, num_bytes // PAGE * 8, address // PAGE * 8)
    entries = np.frombuffer(raw, np.uint64)
    own = ((entries & _PRESENT_OR_SWAPPED) != 0) & ((entries & _OF_A_FILE) == 0)
    edges = np.flatnonzero(np.diff(own, prepend=False, append=False)) * PAGE
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _read_whole(source: int, whole: memoryview, part: slice, address: int) -> None:
    """Read a process's memory at `address` into a part of ours; the kernel may read less."""
    at = part.start
    while at < part.stop:
        num_bytes = os.preadv(source, [whole[at : part.stop]], address + at - part.start)
        if num_bytes == 0:
            raise OSError("the process ended")
        at += num_bytes


class SavedMachine:
    """A machine that stands still, from which any number of copies start: memory and devices."""

    def __init__(self, memory: Memory, devices: bytes, line: LineState) -> None:
        memory.seal()
        self.memory = memory
        self.devices = devices
        self.line = line

    def write_out(self, folder: Path) -> None:
        """Write it to two files, durably.

        Raises:
            SandboxFileError: The disk is full, or the folder gone.

        """
        try:
            with (folder / STATE).open("wb") as file:
                file.write(self.devices)
                file.flush()
                os.fsync(file.fileno())
            with (folder / MEMORY).open("wb") as file:
                copy_data(self.memory.fd, file.fileno())
                os.fsync(file.fileno())
        except OSError as error:
            raise SandboxFileError(f"checkpoint {folder}: {error}") from error


def load_saved(folder: Path, line: LineState, mem_bytes: int) -> SavedMachine:
    """Read what `write_out` wrote.

    Raises:
        SandboxFileError: The memory is absent, or not of `mem_bytes`.

    """
    memory = Memory(mem_bytes)
    try:
        devices = (folder / STATE).read_bytes()
        size = (folder / MEMORY).stat().st_size
        if size == mem_bytes:
            with (folder / MEMORY).open("rb") as file:
                copy_data(file.fileno(), memory.fd)
    except OSError as error:
        raise SandboxFileError(f"checkpoint {folder}: {error}") from error
    if size != mem_bytes:
        words = f"{size} bytes of memory, expected {mem_bytes}"
        raise SandboxFileError(f"checkpoint {folder}: {words}")
    return SavedMachine(memory, devices, line)
