"""Bubblewrap alone: namespaces around the host's kernel. Only for tests and trusted code.

The same guest agent is PID 1 of the namespace, so requests behave as in a machine.
"""

import platform
from pathlib import Path

from penstock.envs.microvm.images.assets import digest_bytes, find_bubblewrap, load_assets
from penstock.envs.microvm.machine import GuestSandbox, start_machine
from penstock.envs.sandbox import Capability, IsolationClass
from penstock.messages.rollout import SandboxRecord

WRITABLE_MIB = 64


class ProcessBackend:
    """Starts one bubblewrap for each sandbox, over the host's own programs, read-only.

    Args:
        cache: Folder with the guest agent; default `assets.vm_cache_dir()`.

    Raises:
        BackendUnavailable: The agent or bubblewrap is missing.

    """

    name = "process"
    isolation_class = IsolationClass.PROCESS
    capabilities = frozenset({Capability.COLD_BOOT, Capability.NETWORK})

    def __init__(self, cache: Path | None = None) -> None:
        folder, assets = load_assets(cache)
        size = str(WRITABLE_MIB << 20)
        self._info = SandboxRecord(
            backend=self.name,
            isolation_class=self.isolation_class,
            kernel_digest=digest_bytes(platform.release().encode()),
            image_digest="host",
            boot_ms=0.0,
        )
        self._command_prefix = [
            find_bubblewrap(),
            *("--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session"),
            *("--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--clearenv"),
            *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
            *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
            *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
            *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", size, "--tmpfs", "/tmp"),  # noqa: S108
            *("--size", size, "--tmpfs", "/work", "--size", size, "--tmpfs", "/home/agent"),
            *("--ro-bind", str(folder / assets.agent), "/agent", "--", "/agent"),
        ]

    def _command(self, guest_fd: int) -> list[str]:
        return [*self._command_prefix, str(guest_fd)]

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> GuestSandbox:
        """See `SandboxBackend.start`."""
        return await start_machine(self._command, self._info, cpu=cpu, timeout_s=timeout_s)
