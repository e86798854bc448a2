"""Orphans of killed processes: the launcher adopts them and kills them.

A process that dies takes its children along only where the kernel knew in time. Whatever it
started is re-parented to the nearest subreaper, the launcher, instead of pid 1.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S_MAX = 10.0
"""Longest wait for killed processes; `reap_ended` reaps the others later."""
_POLL_S = 0.01
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the new parent of all orphans below it.

    Raises:
        OSError: The kernel refuses.

    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_orphans(started: Collection[int]) -> int:
    """Kill and reap the adopted children; return how many.

    Args:
        started: Process ids of this process's own session leaders, which are spared, as is
            every process of this session.

    """
    orphans = [pid for pid in _children() if pid not in started and not _is_in_our_session(pid)]
    for pid in orphans:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    give_up_at = time.monotonic() + _END_S_MAX
    left = orphans
    while (left := [pid for pid in left if not _reap(pid)]) and time.monotonic() < give_up_at:
        time.sleep(_POLL_S)
    return len(orphans)


def reap_ended(started: Collection[int]) -> int:
    """Reap adopted children that ended by themselves; return how many.

    A machine's inner processes are adopted whenever their parent ends first, thousands of times
    per run; unreaped, they would fill the process table.
    """
    ended = [
        pid
        for pid in _children()
        if pid not in started and not _is_in_our_session(pid) and _is_zombie(pid)
    ]
    for pid in ended:
        _reap(pid)
    return len(ended)


def _reap(pid: int) -> bool:
    """Return whether a child has ended; it leaves the process table then."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for children in lists for pid in children.read_text().split()]


def _is_in_our_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == os.getsid(0)
    except ProcessLookupError:
        return False


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "Z"
