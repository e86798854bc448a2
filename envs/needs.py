"""What a task's machines need, and what a host offers. Pure."""

from typing import Protocol, runtime_checkable

from penstock.envs.sandbox import Capability, IsolationClass, Machine, NeedsRefused
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


@runtime_checkable
class SizedBackend(Sizeable, Protocol):
    """A backend whose machines may have several sizes."""

    needs: MachineNeeds
    """Size of its machines, every number set but `disk_mib`."""
    capabilities: frozenset[Capability]

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> Machine:
        """See `SandboxBackend.start`."""
        ...

    def resized(self, needs: MachineNeeds) -> "SizedBackend":
        """Return the same backend, image included, with machines of another size."""
        ...


def fitted(
    needs: MachineNeeds, own: MachineNeeds, backend: Sizeable, live_max: int
) -> tuple[MachineNeeds, int]:
    """Return the size of a task's machines on a host, and how many of the pool's own they equal.

    Args:
        needs: The task's.
        own: Size of the pool's machines, from `sized`: what a task does not name is as there.
        backend: Of the pool, or its class.
        live_max: Machines of the pool's own size that the host has room for.

    Raises:
        NeedsRefused: It has less than the task needs; the text has both numbers.

    """
    check_numbers(needs)
    asked = MachineNeeds(
        memory_mib=max(needs.memory_mib, own.memory_mib),
        disk_mib=needs.disk_mib or own.disk_mib,
        processors=max(needs.processors, own.processors),
        isolation_min=needs.isolation_min,
    )
    size = sized(asked, backend)
    num_own = -(-size.memory_mib // own.memory_mib)
    if num_own > live_max:
        raise NeedsRefused(
            f"machine.memory_mib: {size.memory_mib} are needed (disk_mib {needs.disk_mib} lie in "
            f"them), and this host has {live_max * own.memory_mib}: sandbox_host.pool.live_max "
            f"{live_max} times {own.memory_mib}"
        )
    return size, num_own


def sized(needs: MachineNeeds, backend: Sizeable) -> MachineNeeds:
    """Return the size of a backend's machines: every number set but `disk_mib`, 0 for all of 70%.

    Raises:
        NeedsRefused: The backend has fewer processors or isolates less, or a number makes no sense.

    """
    check_numbers(needs)
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


def check_numbers(needs: MachineNeeds) -> None:
    """Check what can be checked without a host; raises NeedsRefused."""
    for field in ("memory_mib", "disk_mib", "processors"):
        if not 0 <= getattr(needs, field) < 1 << 24:
            raise NeedsRefused(
                f"machine.{field}: expected 0 <= x < 2^24, got {getattr(needs, field)}"
            )
    if needs.isolation_min and needs.isolation_min not in _STRENGTH:
        raise NeedsRefused(
            f"machine.isolation_min: expected one of {', '.join(_STRENGTH)}, "
            f"got {needs.isolation_min!r}"
        )


def check_isolation(least: str, name: str, offered: IsolationClass) -> None:
    """Check that a backend isolates enough; raises NeedsRefused."""
    if not least:
        return
    if _STRENGTH[offered] < _STRENGTH[least]:
        raise NeedsRefused(
            f"machine.isolation_min: {least} is needed, and a machine of {name!r} is {offered}"
        )
