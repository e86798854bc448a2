"""Pages that a process made its own are found and copied; a saved memory cannot be changed."""

import mmap
import os
import subprocess
import sys

import pytest

from penstock.envs.microvm.protocol import LineState
from penstock.envs.microvm.qemu.memory import (
    Memory,
    SavedMachine,
    copy_data,
    copy_own_pages,
    find_mapping,
    load_saved,
)
from penstock.envs.sandbox import SandboxDied, SandboxFileError

PAGE = mmap.PAGESIZE
NUM_PAGES = 64
WRITER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
for page in (1, 2, 40):
    memory[page * mmap.PAGESIZE] = 7
memory[50 * mmap.PAGESIZE]  # read alone: it stays the file's
print("written", flush=True)
sys.stdin.read()
"""


def filled():
    """A memory whose pages 0 to 9 hold something."""
    memory = Memory(NUM_PAGES * PAGE)
    os.pwrite(memory.fd, b"\1" * (10 * PAGE), 0)
    return memory


@pytest.fixture
def writer():
    """A process that made three pages of a memory its own."""
    memory = filled()
    path = f"/proc/self/fd/{memory.fd}"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, path],
        pass_fds=[memory.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout.readline() == b"written\n"
        yield memory, process
        process.kill()


def test_only_a_process_own_pages_are_copied(writer):
    memory, process = writer
    target = Memory(memory.num_bytes)
    copy_own_pages(find_mapping(process.pid, memory), target)
    copied = os.pread(target.fd, target.num_bytes, 0)
    held = [page for page in range(NUM_PAGES) if any(copied[page * PAGE : (page + 1) * PAGE])]
    assert held == [1, 2, 40]
    assert copied[PAGE : 3 * PAGE] == 2 * (b"\7" + b"\1" * (PAGE - 1))
    assert copied[40 * PAGE : 41 * PAGE] == b"\7" + bytes(PAGE - 1)


def test_a_process_that_ended_is_said_to_have_died(writer):
    memory, process = writer
    mapping = find_mapping(process.pid, memory)
    process.kill()
    process.wait()
    with pytest.raises(SandboxDied, match="cannot read"):
        copy_own_pages(mapping, Memory(memory.num_bytes))
    with pytest.raises(SandboxDied):
        find_mapping(process.pid, memory)


def test_a_process_without_the_memory_is_named():
    with pytest.raises(SandboxDied, match="maps no guest memory"):
        find_mapping(os.getpid(), Memory(PAGE))


def test_holes_stay_holes(tmp_path):
    memory = filled()
    os.pwrite(memory.fd, b"\2", 50 * PAGE)
    with (tmp_path / "file").open("w+b") as file:
        copy_data(memory.fd, file.fileno())
        assert os.lseek(file.fileno(), 10 * PAGE, os.SEEK_DATA) == 50 * PAGE
        assert os.pread(file.fileno(), memory.num_bytes, 0) == os.pread(
            memory.fd, memory.num_bytes, 0
        )


def test_a_saved_memory_cannot_be_changed_and_comes_back_from_disk(tmp_path):
    saved = SavedMachine(filled(), b"devices", LineState(sent=3, next_id=4, epoch=5))
    with pytest.raises(PermissionError):
        os.pwrite(saved.memory.fd, b"x", 0)
    saved.write_out(tmp_path)
    again = load_saved(tmp_path, saved.line, saved.memory.num_bytes)
    assert again.devices == b"devices"
    assert os.pread(again.memory.fd, PAGE, 9 * PAGE) == b"\1" * PAGE
    with pytest.raises(SandboxFileError, match="bytes of memory, expected"):
        load_saved(tmp_path, saved.line, PAGE)
    (tmp_path / "memory").unlink()
    with pytest.raises(SandboxFileError, match="memory"):
        load_saved(tmp_path, saved.line, saved.memory.num_bytes)


def test_a_host_without_room_and_a_folder_that_is_gone_have_types(tmp_path, monkeypatch):
    saved = SavedMachine(filled(), b"devices", LineState())
    with pytest.raises(SandboxFileError, match="checkpoint"):
        saved.write_out(tmp_path / "gone")

    def refuse(name, flags):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(
        SandboxDied, match=r"cannot allocate memory for a machine: .*Too many open files"
    ):
        Memory(PAGE)
