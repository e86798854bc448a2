"""Processor time of this process, shared out among the actors in it.

The kernel counts it for the process: its threads, and children that have ended. Actors that share a
process share it by how long each was busy, what nobody accounts for (the connection, the loop)
included, so that the actors' times add up to the process's.
"""

import os
import resource
from collections.abc import Callable
from pathlib import Path

from penstock.actors.runtime.meter import Meter

_TICKS = os.sysconf("SC_CLK_TCK")


def process_s(*, with_children: bool = True) -> float:
    """Return the processor seconds of this process, and of its children that have ended."""
    whose = (resource.RUSAGE_SELF, *((resource.RUSAGE_CHILDREN,) if with_children else ()))
    usages = map(resource.getrusage, whose)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def processor_s_of(pid: int) -> float:
    """Return the processor seconds of another process on this host; 0 where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


class ProcessorTime:
    """One of a process; its actors join it."""

    def __init__(self, measure: Callable[[], float] = process_s) -> None:
        """Begin with all that the process has used since it began."""
        self._measure = measure
        self._meters: dict[str, Meter] = {}
        self._busy_s: dict[str, float] = {}
        self._used_s: dict[str, float] = {}
        self._shared_s = 0.0

    def join(self, actor: str, meter: Meter) -> None:
        """Share with one more actor."""
        self._meters[actor] = meter
        self._busy_s[actor], self._used_s[actor] = meter.busy_s, 0.0

    def used_s(self, actor: str) -> float:
        """Return an actor's part so far."""
        self._share()
        return self._used_s[actor]

    def _share(self) -> None:
        """Share out what was used since the last time."""
        measured_s = self._measure()
        new_s, self._shared_s = measured_s - self._shared_s, measured_s
        busy_s = {name: meter.busy_s - self._busy_s[name] for name, meter in self._meters.items()}
        total_s = sum(busy_s.values())
        for name, one_s in busy_s.items():
            part = one_s / total_s if total_s > 0 else 1 / len(busy_s)
            self._used_s[name] += part * new_s
            self._busy_s[name] += one_s
