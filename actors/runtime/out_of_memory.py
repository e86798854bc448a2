"""Detects whether the kernel's OOM killer has just killed a process."""

import time
from collections import deque
from pathlib import Path

OOM_S = 5.0
"""Maximum age in seconds of an OOM kill that can explain the death of a process."""
# cgroup v2, cgroup v1, then the whole machine: the narrowest counter that exists is used.
_COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)


class OutOfMemoryWatch:
    """Samples the kernel's counter of OOM kills."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=16)
        self.sample()

    def sample(self) -> None:
        """Read the counter; call at least every second."""
        self._samples.append((time.monotonic(), _num_out_of_memory()))

    def has_risen(self) -> bool:
        """Return whether the counter has risen within the last `OOM_S` seconds."""
        self.sample()
        latest_at, latest = self._samples[-1]
        return any(n < latest for at, n in self._samples if at >= latest_at - OOM_S)


def _num_out_of_memory() -> int:
    for path in _COUNTERS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0
