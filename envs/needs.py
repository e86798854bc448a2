"""Matches the machine size that a task needs with what a host offers. Pure."""

from typing import Protocol, runtime_checkable

from penstock.envs.sandbox import Capability, IsolationClass, Machine, NeedsRefused
from penstock.messages.task import MachineNeeds

FILES_PERCENT_MAX = 70
"""Percentage of a machine's memory that files may take (also in `microvm/guest/main.c`)."""
MEMORY_MIB_MIN = 64
"""Smallest memory that a machine is started with."""
DEFAULT_NEEDS = MachineNeeds()
_STRENGTH = {str(name): n for n, name in enumerate(reversed(IsolationClass))}


class BackendLimits(Protocol):
    """Size limits that a backend, or its class, declares."""

    name: str
    isolation_class: IsolationClass
    processors_max: int
    memory_mib: int
    """Default memory of a machine."""


@runtime_checkable
class SizedBackend(BackendLimits, Protocol):
    """A backend whose machines may have several sizes."""

    needs: MachineNeeds
    """Size of its machines; all fields are set except that `disk_mib` may be 0."""
    capabilities: frozenset[Capability]

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> Machine:
        """See `SandboxBackend.start`."""
        ...

    def resized(self, needs: MachineNeeds) -> "SizedBackend":
        """Return a backend with the same image whose machines have another size."""
        ...


def fit_machine_size(
    needs: MachineNeeds, own: MachineNeeds, backend: BackendLimits, live_max: int
) -> tuple[MachineNeeds, int]:
    """Return the size of a task's machines, and how many default machines of the pool each equals.

    Args:
        needs: Needs of the task.
        own: Default machine size of the pool, from `resolve_machine_size`; it fills in what the
            task leaves open.
        backend: Backend of the pool, or its class.
        live_max: Maximum machines of the default size on the host.

    Raises:
        NeedsRefused: The host offers less than the task needs; the error names both.

    """
    check_numbers(needs)
    asked = MachineNeeds(
        memory_mib=max(needs.memory_mib, own.memory_mib),
        disk_mib=needs.disk_mib or own.disk_mib,
        processors=max(needs.processors, own.processors),
        isolation_min=needs.isolation_min,
    )
    size = resolve_machine_size(asked, backend)
    # `live_max` exists to bound memory, so a larger machine counts by its memory, rounded up.
    num_slots = -(-size.memory_mib // own.memory_mib)
    if num_slots > live_max:
        raise NeedsRefused(
            f"machine.memory_mib: the task needs {size.memory_mib} (including its files, disk_mib "
            f"{needs.disk_mib}), this host has {live_max * own.memory_mib}: "
            f"sandbox_host.pool.live_max {live_max} times {own.memory_mib}"
        )
    return size, num_slots


def resolve_machine_size(needs: MachineNeeds, backend: BackendLimits) -> MachineNeeds:
    """Return the size of a backend's machines, with defaults filled in.

    `disk_mib` stays 0 unless requested: files may then take 70% of the memory.

    Raises:
        NeedsRefused: The backend has too few processors, too weak isolation, or a number is
            invalid.

    """
    check_numbers(needs)
    if needs.processors > backend.processors_max:
        raise NeedsRefused(
            f"machine.processors: the task needs {needs.processors}, a machine of backend "
            f"{backend.name!r} has at most {backend.processors_max}"
        )
    check_isolation(needs.isolation_min, backend.name, backend.isolation_class)
    # Files live in guest memory (tmpfs), so a larger disk needs a proportionally larger memory.
    for_files = -(-needs.disk_mib * 100 // FILES_PERCENT_MAX)
    memory_mib = max(needs.memory_mib or backend.memory_mib, for_files, MEMORY_MIB_MIN)
    return MachineNeeds(
        memory_mib=memory_mib, disk_mib=needs.disk_mib, processors=needs.processors or 1
    )


def check_numbers(needs: MachineNeeds) -> None:
    """Check the values that need no host to check; raise NeedsRefused if one is invalid."""
    for field in ("memory_mib", "disk_mib", "processors"):
        # 2^24 MiB are 16 TiB: more than any host can offer.
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
    """Raise NeedsRefused if a backend isolates less than a task demands."""
    if not least:
        return
    if _STRENGTH[offered] < _STRENGTH[least]:
        raise NeedsRefused(
            f"machine.isolation_min: the task needs {least}, backend {name!r} offers {offered}"
        )
