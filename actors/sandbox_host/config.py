"""Settings of a sandbox host."""

from typing import Annotated

import msgspec

from penstock.messages.settings import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    one_of,
)
from penstock.messages.task import MachineNeeds, Purpose


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines of one sandbox host."""

    backend: str = "uml"
    """`uml`, `qemu-tcg`, `qemu-kvm`, `process` or, experimental, `firecracker`."""
    allow_process: bool = False
    """Accept the `process` backend, which isolates less, and train on its rollouts."""
    size: NonNegativeInt = 4
    """Maximum idle machines kept ready."""
    live_max: PositiveInt = 40
    """Maximum machines, idle and leased; bounds memory, as a larger one counts as several."""
    memory_mib: NonNegativeInt = 0
    """Memory of a machine in MiB, its files included; 0: the backend's own (uml 128, QEMU 256).
    `live_max` times it is what a task's machine may have at most."""
    disk_mib: NonNegativeInt = 0
    """Files of a machine in MiB, at most 70% of its memory; 0: all of these."""
    processors: PositiveInt = 1
    """Processors of each machine; `uml` has one."""

    @property
    def needs(self) -> MachineNeeds:
        """The size of its machines."""
        return MachineNeeds(
            memory_mib=self.memory_mib, disk_mib=self.disk_mib, processors=self.processors
        )


class SandboxHostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what one host leases."""

    host: str = "local"
    """Its name, unique among a run's hosts: one subject token."""
    pool: PoolConfig = PoolConfig()
    """Its machines."""
    lease_s_max: PositiveFloat = 600.0
    """Longest lease that a client may name."""
    acquire_s_max: PositiveFloat = 5.0
    """Longest wait for a free machine, before the client hears that this host is busy."""

    checkpoints: str = ""
    """Folder of saved machines, of a run: one below it for each run and host. By default in the
    run's folder. Of a host: its own, which no other one shares."""
    checkpoints_max: PositiveInt = 64
    """Kept; the oldest goes first. Each has the memory that its machine used."""
    reports_to_scheduler: bool = False
    """Whether a scheduler places groups on this host (`actors/scheduler/actor.py`)."""

    images: str = ""
    """Folder of image layers, one below it for each host: a layer that a task names is copied there
    from the shared cache (`penstock images`). By default machines use those of the cache."""
    images_max: PositiveInt = 8
    """Images ready at once besides the one that all machines have by default, each with a machine
    that waits; the least recently requested one is removed first."""

    reserved_slots: NonNegativeInt = 1
    """Machines of a host that are reserved for grading: rollouts that need more machines than there
    are leave room for it. A host of one machine reserves none."""
    quota: NonNegativeInt = 0
    """Maximum machines that the scheduler places for one holder; 0 for no bound."""
    quotas: dict[Annotated[str, one_of(Purpose)], NonNegativeInt] = {}
    """A purpose's own quota (train, eval), in place of `quota`."""

    isolation_min: str = ""
    """Least isolation of machines for strangers' tasks, which bring a verifier of their own:
    `process`, `user_mode_kernel`, `emulated_vm` or `hardware_vm`. A host that offers less refuses
    them. By default any will do."""
    egress_addresses: bool = False
    """Whether a task's rule may name an address (`name:port@address`), private ones included."""
