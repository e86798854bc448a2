"""Backend without a guest kernel: bubblewrap namespaces on the host's. For trusted code only.

The usual guest agent is PID 1 of the namespace, so requests behave as in other machines.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.envs.microvm.confinement.confinement import Confinement
from penstock.envs.microvm.confinement.filters import REFUSED_CALLS, refuse_only
from penstock.envs.microvm.images.assets import digest_bytes, load_assets
from penstock.envs.microvm.machine import GuestSandbox, start_machine
from penstock.envs.needs import DEFAULT_NEEDS, resolve_machine_size
from penstock.envs.sandbox import Capability, IsolationClass
from penstock.messages.rollout import SandboxRecord
from penstock.messages.task import MachineNeeds

WRITABLE_MIB = 64
"""Size of each writable folder."""


class ProcessBackend:
    """Starts one bubblewrap per sandbox, with the host's programs mounted read-only.

    Args:
        cache: Folder with the guest agent; defaults to `assets.vm_cache_dir()`.
        needs: Limits of its programs, enforced where the host has control groups.
        mounts: More bubblewrap options, which expose files of this process's user. The sandbox then
            runs as that user.

    Raises:
        BackendUnavailable: The agent or bubblewrap is missing.

    """

    name = "process"
    isolation_class = IsolationClass.PROCESS
    capabilities = frozenset({Capability.COLD_BOOT, Capability.NETWORK})

    processors_max = os.cpu_count() or 1
    memory_mib = 1024
    """Default memory of all programs and files, enforced where the host has control groups."""

    def __init__(
        self,
        cache: Path | None = None,
        needs: MachineNeeds = DEFAULT_NEEDS,
        *,
        mounts: Sequence[str] = (),
    ) -> None:
        self.needs = resolve_machine_size(needs, self)
        self._cache, self._mounts = cache, mounts
        folder, assets = load_assets(cache)
        size = str(WRITABLE_MIB << 20)
        own = [
            *("--as-pid-1", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
            *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
            *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
            *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", size, "--tmpfs", "/tmp"),  # noqa: S108
            *("--size", size, "--tmpfs", "/work", "--size", size, "--tmpfs", "/home/agent"),
        ]
        self._confinement = Confinement(
            folder / assets.launcher,
            {"agent": folder / assets.agent},
            [*own, *mounts],
            calls=refuse_only(REFUSED_CALLS.values()),
            memory_mib=self.needs.memory_mib,
            own_user=not mounts,
        )
        self._info = SandboxRecord(
            backend=self.name,
            isolation_class=self.isolation_class,
            kernel_digest=digest_bytes(platform.release().encode()),
            image_digest="host",
            boot_ms=0.0,
            confinement=self._confinement.in_force,
        )

    @staticmethod
    def _program(guest_fd: int, files: Mapping[str, str]) -> list[str]:
        return [files["agent"], str(guest_fd)]

    def resized(self, needs: MachineNeeds) -> "ProcessBackend":
        """See `SizedBackend.resized`."""
        return ProcessBackend(self._cache, needs, mounts=self._mounts)

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> GuestSandbox:
        """See `SandboxBackend.start`."""
        return await start_machine(
            self._confinement, self._program, self._info, cpu=cpu, timeout_s=timeout_s
        )
