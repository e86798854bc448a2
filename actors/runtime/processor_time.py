"""CPU time of this process, divided among the actors in it.

The kernel counts CPU time per process, including its threads and its ended children. It is divided
among the actors in proportion to their busy time. That includes the overhead that belongs to no
actor (the connection, the event loop), so the actors' times add up to the time of the process.
"""

import os
import resource
from collections.abc import Callable
from pathlib import Path

from penstock.actors.runtime.meter import Meter

_TICKS = os.sysconf("SC_CLK_TCK")


def process_s(*, with_children: bool = True) -> float:
    """Return the CPU seconds of this process and, if asked, of its children that have ended."""
    whose = (resource.RUSAGE_SELF, *((resource.RUSAGE_CHILDREN,) if with_children else ()))
    usages = map(resource.getrusage, whose)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def processor_s_of(pid: int) -> float:
    """Return the CPU seconds of another process on this host; 0 if there is no such process."""
    try:
        # After the last ")": the command name before it may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # Fields 14 and 15 of proc(5), utime and stime; the first two were cut off.
    return (int(fields[11]) + int(fields[12])) / _TICKS


class ProcessorTime:
    """CPU time of one process, divided among the actors that joined it."""

    def __init__(self, measure: Callable[[], float] = process_s) -> None:
        """Start with no actors; CPU time used before the first one joins is divided as well.

        Args:
            measure: Returns the CPU seconds of the process so far.

        """
        self._measure = measure
        self._meters: dict[str, Meter] = {}
        self._busy_s: dict[str, float] = {}
        self._used_s: dict[str, float] = {}
        self._shared_s = 0.0

    def join(self, actor: str, meter: Meter) -> None:
        """Add an actor whose busy time `meter` counts."""
        self._meters[actor] = meter
        self._busy_s[actor], self._used_s[actor] = meter.busy_s, 0.0

    def used_s(self, actor: str) -> float:
        """Return the CPU seconds attributed to an actor so far."""
        self._share()
        return self._used_s[actor]

    def _share(self) -> None:
        """Divide the CPU time used since the last call among the actors."""
        measured_s = self._measure()
        new_s, self._shared_s = measured_s - self._shared_s, measured_s
        busy_s = {name: meter.busy_s - self._busy_s[name] for name, meter in self._meters.items()}
        total_s = sum(busy_s.values())
        for name, actor_busy_s in busy_s.items():
            # While all are idle, the event loop still uses some: equal shares.
            part = actor_busy_s / total_s if total_s > 0 else 1 / len(busy_s)
            self._used_s[name] += part * new_s
            self._busy_s[name] += actor_busy_s
