"""Processes below one: of a tree whose root adopts orphans, and of nobody else's."""

import time
from pathlib import Path

GONE_S_MAX = 15.0
"""The kernel takes a killed namespace away a moment later; longer is an orphan."""


def children_of(pid: int) -> list[int]:
    """All live descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child] * (not gone(child)) + children_of(child)
    return found


def gone(pid: int) -> bool:
    """Tell whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_machine(pid: int) -> bool:
    """Tell whether a process is a user-mode kernel."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/linux\0")
    except (FileNotFoundError, ProcessLookupError):
        return False


def machines_of(pid: int) -> list[int]:
    """The user-mode kernels below a process."""
    return [child for child in children_of(pid) if is_machine(child)]


def left_of(pids: list[int]) -> list[int]:
    """Those that live on."""
    deadline = time.monotonic() + GONE_S_MAX
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if not gone(pid)]


def num_descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
