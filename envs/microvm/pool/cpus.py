"""Pins each machine to the processor with the fewest machines."""

import os
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from penstock.envs.sandbox import Machine


class Cpus:
    """The processors that this process may use, and the machines that exist."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))
        self._load: Counter[int] = Counter()
        self._cpu_of: dict[Machine, int] = {}

    def __len__(self) -> int:
        """Return how many machines exist; those that start do not count."""
        return len(self._cpu_of)

    def __contains__(self, machine: Machine) -> bool:
        """Report whether a machine exists."""
        return machine in self._cpu_of

    def machines(self) -> list[Machine]:
        """Return all that exist."""
        return list(self._cpu_of)

    @contextmanager
    def starting(self) -> Generator[int]:
        """Yield the processor for a machine that starts; a failed start returns it."""
        cpu = min(self._cpus, key=lambda c: self._load[c])
        self._load[cpu] += 1
        try:
            yield cpu
        except BaseException:
            self._load[cpu] -= 1
            raise

    def take(self, machine: Machine, cpu: int) -> None:
        """Record a started machine."""
        self._cpu_of[machine] = cpu

    def free(self, machine: Machine) -> None:
        """Record an ended machine."""
        self._load[self._cpu_of.pop(machine)] -= 1
