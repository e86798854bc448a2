"""What a task's machines need, and what a host offers. Pure."""

from typing import Protocol

from penstock.envs.sandbox import IsolationClass, NeedsRefused
from penstock.messages.task import MachineNeeds

FILES_PERCENT_MAX = 70
"""Of a machine's memory that may hold files (`microvm/guest/main.c` has the same number)."""
MEMORY_MIB_MIN = 64
DEFAULT_NEEDS = MachineNeeds()
_STRENGTH = {str(name): n for n, name in enumerate(reversed(IsolationClass))}


class Sizeable(Protocol):
    """What is asked of a backend, or of its class."""

    name: str
    isolation_class: IsolationClass
    processors_max: int
    memory_mib: int
    """Of a machine that nobody asks more for."""


def sized(needs: MachineNeeds, backend: Sizeable) -> MachineNeeds:
    """Return the size of a backend's machines: every number set but `disk_mib`, 0 for all of 70%.

    Raises:
        NeedsRefused: The backend has fewer processors or isolates less, or a number makes no sense.

    """
    for field in ("memory_mib", "disk_mib", "processors"):
        if not 0 <= getattr(needs, field) < 1 << 24:
            raise NeedsRefused(f"machine.{field}: expected 0 <= x < 2^24, got {needs}")
    if needs.processors > backend.processors_max:
        raise NeedsRefused(
            f"machine.processors: {needs.processors} are needed, and a machine of "
            f"{backend.name!r} has at most {backend.processors_max}"
        )
    check_isolation(needs.isolation_min, backend.name, backend.isolation_class)
    for_files = -(-needs.disk_mib * 100 // FILES_PERCENT_MAX)
    memory_mib = max(needs.memory_mib or backend.memory_mib, for_files, MEMORY_MIB_MIN)
    return MachineNeeds(
        memory_mib=memory_mib, disk_mib=needs.disk_mib, processors=needs.processors or 1
    )


def check_isolation(least: str, name: str, offered: IsolationClass) -> None:
    """Check that a backend isolates enough; raises NeedsRefused."""
    if not least:
        return
    if least not in _STRENGTH:
        raise NeedsRefused(
            f"machine.isolation_min: expected one of {', '.join(_STRENGTH)}, got {least!r}"
        )
    if _STRENGTH[offered] < _STRENGTH[least]:
        raise NeedsRefused(
            f"machine.isolation_min: {least} is needed, and a machine of {name!r} is {offered}"
        )
