"""A QEMU machine that stands still: what any number of copies go on from."""

import os
from pathlib import Path

from penstock.envs.microvm.checkpoint import STATE
from penstock.envs.microvm.protocol import LineState
from penstock.envs.microvm.qemu.memory import Memory, copy_data
from penstock.envs.sandbox import SandboxFileError

MEMORY = "memory"
"""The second file of a checkpoint: the guest's memory, with holes where it is empty."""


class Saved:
    """A guest's memory, which nobody changes from now on, and its devices."""

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


def load_saved(folder: Path, line: LineState, mem_bytes: int) -> Saved:
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
    return Saved(memory, devices, line)
