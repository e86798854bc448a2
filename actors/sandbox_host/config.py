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
    """Allow the less isolated `process` backend, and train on its rollouts."""
    size: NonNegativeInt = 4
    """Maximum idle machines kept ready."""
    live_max: PositiveInt = 40
    """Maximum machines, idle and leased; a larger machine counts as several."""
    memory_mib: NonNegativeInt = 0
    """Memory of a machine in MiB, including its files; 0 is the backend's default (uml 128, QEMU
    256). A task's machine may have at most `live_max` times as much."""
    disk_mib: NonNegativeInt = 0
    """Maximum MiB of files in a machine, at most 70% of its memory; 0 is that maximum."""
    processors: PositiveInt = 1
    """CPUs of each machine; `uml` has one."""

    @property
    def needs(self) -> MachineNeeds:
        """Default size of a machine."""
        return MachineNeeds(
            memory_mib=self.memory_mib, disk_mib=self.disk_mib, processors=self.processors
        )


class SandboxHostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sandbox host: its pool and limits."""

    host: str = "local"
    """Name of the host, unique within a run; a single subject token."""
    pool: PoolConfig = PoolConfig()
    lease_s_max: PositiveFloat = 600.0
    """Maximum seconds of a lease."""
    acquire_s_max: PositiveFloat = 5.0
    """Maximum seconds to wait for a free machine before the host answers that it is busy."""

    checkpoints: str = ""
    """Folder of saved machines. In a run's configuration, each run and host gets a subfolder, and
    the default is in the run's folder. On a host, the folder is not shared with another host."""
    checkpoints_max: PositiveInt = 64
    """Maximum checkpoints, each as large as its machine's used memory; the oldest is removed."""
    reports_to_scheduler: bool = False
    """Whether a scheduler places groups on this host (`actors/scheduler/actor.py`)."""

    images: str = ""
    """Folder of image layers, with a subfolder per host, to which layers of tasks are copied from
    the shared cache (`penstock images`). By default machines use the cache itself."""
    images_max: PositiveInt = 8
    """Maximum images ready besides the default one, each with an idle machine; the least recently
    requested image is removed first."""

    reserved_slots: NonNegativeInt = 1
    """Machines reserved for grading, which rollouts cannot take. A host with a single machine
    reserves none."""
    quota: NonNegativeInt = 0
    """Maximum machines that the scheduler places for one holder; 0 for no limit."""
    quotas: dict[Annotated[str, one_of(Purpose)], NonNegativeInt] = {}
    """Quotas of single purposes (train, eval) that replace `quota`."""

    isolation_min: str = ""
    """Minimum isolation for foreign tasks, which bring their own verifiers: `process`,
    `user_mode_kernel`, `emulated_vm` or `hardware_vm`. A host with less refuses them. By default
    any isolation is accepted."""
    egress_addresses: bool = False
    """Whether a task's rule may name an address (`name:port@address`), private ones included."""
