"""Processes below one: of a tree whose root adopts orphans, and of nobody else's."""

import contextlib
import time
from pathlib import Path

GONE_S_MAX = 15.0
"""The kernel takes a killed namespace away a moment later; longer is an orphan."""


def children_of(pid: int) -> list[int]:
    """All live descendants of a process."""
    live = [child for child in _children(pid) if not gone(child)]
    return live + [below for child in live for below in children_of(child)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # It has just ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # The thread has.
                found += map(int, (task / "children").read_text().split())
    return found


def gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_machine(pid: int) -> bool:
    """Return whether a process is a user-mode kernel."""
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
