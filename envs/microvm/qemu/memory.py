"""Memory of QEMU guests: a file in memory (memfd) that copies map privately.

```
 base     a sealed memfd with the memory of a machine at the time it was saved
   └─ a copy maps it privately; pages that it writes become its own
         └─ saved again: a new memfd with the pages of the base, overwritten by the copy's own
```
The host finds a process's own pages in `/proc/PID/pagemap` and reads them through `/proc/PID/mem`,
so a machine that is saved is paused only while its own pages are copied.
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
"""Seals of a base memory. 0x10 is F_SEAL_FUTURE_WRITE: nobody can change the file, but processes
may still map it privately."""
# Bits of an entry of /proc/PID/pagemap: 63 present, 62 swapped, 61 page of a file or shared.
_PRESENT_OR_SWAPPED = np.uint64(3 << 62)
_OF_A_FILE = np.uint64(1 << 61)


class Memory:
    """Memory of a guest; freed when this object and all mappings are gone.

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
            raise SandboxDied(f"cannot allocate memory for a machine: {error}") from error

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def seal(self) -> None:
        """Forbid all further changes."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)


def copy_data(source: int, target: int) -> None:
    """Copy the content of a file to an empty one, keeping holes.

    Args:
        source: Descriptor to read from.
        target: Descriptor of the empty file.

    """
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, end in _data(source, size):
        at = os.lseek(target, start, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(target, source, at, end - at)
            # Without this check a file that shrinks meanwhile would cause an endless loop.
            if sent == 0:
                raise OSError(f"the file ended at {at} of {end} bytes")
            at += sent


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) offsets of a file's content between its holes."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


class Mapping(msgspec.Struct, frozen=True):
    """Where a process maps a guest's memory."""

    pid: int
    parts: list[tuple[int, int, int]]
    """Parts of the mapping: (address in the process, offset in the memory, number of bytes)."""


def find_mapping(pid: int, memory: Memory) -> Mapping:
    """Return where a process or one of its descendants maps a memory.

    Raises:
        SandboxDied: None of them does, or this process may not read their maps.

    """
    # QEMU is a descendant of bubblewrap, whose process id is the only one known.
    inode = str(os.fstat(memory.fd).st_ino)
    try:
        for candidate in process_tree(pid):
            lines = Path(f"/proc/{candidate}/maps").read_text().splitlines()
            fields = [line.split(maxsplit=5) for line in lines]
            parts = [_part(*f[:3]) for f in fields if f[4] == inode and "memfd:" in f[-1]]
            if parts:
                return Mapping(candidate, parts)
    except OSError as error:
        raise SandboxDied(f"cannot read the memory of process {pid}: {error}") from error
    raise SandboxDied(f"process {pid} maps no guest memory")


def _part(addresses: str, _: str, offset: str) -> tuple[int, int, int]:
    start, end = (int(text, 16) for text in addresses.split("-"))
    return start, int(offset, 16), end - start


def copy_own_pages(mapping: Mapping, target: Memory) -> None:
    """Copy the pages of a mapping that are the process's own to the same offsets in `target`.

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
        raise SandboxDied(f"cannot read the guest's memory: {error}") from error


def _own_ranges(pagemap: int, address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the ranges that are the process's own, in bytes from `address`."""
    # 8 bytes per page. A private page that was written no longer belongs to the file.
    raw = os.pread(pagemap, num_bytes // PAGE * 8, address // PAGE * 8)
    entries = np.frombuffer(raw, np.uint64)
    own = ((entries & _PRESENT_OR_SWAPPED) != 0) & ((entries & _OF_A_FILE) == 0)
    edges = np.flatnonzero(np.diff(own, prepend=False, append=False)) * PAGE
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _read_whole(source: int, whole: memoryview, part: slice, address: int) -> None:
    """Read a process's memory at `address` into a part of `whole`."""
    # In a loop: the kernel may read less than requested.
    at = part.start
    while at < part.stop:
        num_bytes = os.preadv(source, [whole[at : part.stop]], address + at - part.start)
        if num_bytes == 0:
            raise OSError("the process ended")
        at += num_bytes


class SavedMachine:
    """Memory and device state of a stopped machine, from which any number of copies can start."""

    def __init__(self, memory: Memory, devices: bytes, line: LineState) -> None:
        memory.seal()
        self.memory = memory
        self.devices = devices
        self.line = line

    def write_out(self, folder: Path) -> None:
        """Write memory and devices to two files, durably.

        Raises:
            SandboxFileError: The disk is full, or the folder is gone.

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
    """Read a machine that `write_out` wrote.

    Raises:
        SandboxFileError: A file is missing, or the memory has not `mem_bytes` bytes.

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
        problem = f"found {size} bytes of memory, expected {mem_bytes}"
        raise SandboxFileError(f"checkpoint {folder}: {problem}")
    return SavedMachine(memory, devices, line)
