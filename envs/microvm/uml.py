"""User-mode Linux in bubblewrap: a separate kernel as one unprivileged process.

Its seccomp mode is fast but no boundary by itself: the kernel's own help calls it insecure with
untrusted user space, since a program may reach its own kernel's memory. What holds then is around
it (`confinement/`): namespaces, a filter that allows what user-mode Linux calls and nothing else,
bounds. It is meant for code that a policy writes; strangers' tasks should demand a hardware VM.
"""

from collections.abc import Mapping
from pathlib import Path

from penstock.envs.microvm.confinement.confinement import MARGIN_MIB, Confinement
from penstock.envs.microvm.confinement.filters import UML_CALLS, allow_only
from penstock.envs.microvm.images.layers import LayeredBackend
from penstock.envs.microvm.machine import GuestSandbox, start_machine
from penstock.envs.needs import DEFAULT_NEEDS
from penstock.envs.sandbox import Capability, IsolationClass, SandboxDied
from penstock.messages.task import MachineNeeds

OVERHEAD_MIB = 192
"""Of the host's kernel: mappings and page tables of a guest's processes, up to 256 of them."""
LOOPS_PER_JIFFY = 30_000_000
"""Given, so that the kernel does not spend 80 ms on measuring it."""

ROOT = ("root=/dev/ubda", "ro", "rootfstype=erofs", "init=/sbin/penstock-agent")
DEBIAN_ROOT = (
    *("penstock_image=/dev/ubda", "penstock_line=/dev/ttyS0"),
    # What takes a second to boot: benchmarks, and file systems and bounds that no machine uses.
    "initcall_blacklist=raid6_init,calibrate_xor_blocks,init_btrfs_fs,init_jfs_fs,init_xfs_fs",
    *("lsm=", "audit=0", "cgroup_disable=memory,cpu,io,pids,cpuset,freezer,devices"),
    "pty.legacy_count=0",
    # What the compiled kernel does not have, and no machine's program needs: paths into the kernel.
    *("sysctl.kernel.unprivileged_bpf_disabled=1", "sysctl.kernel.io_uring_disabled=2"),
)
"""For Debian's own kernel, whose first program mounts the image."""
DEBIAN_LIBRARIES = {
    "loader": "/lib64/ld-linux-x86-64.so.2",
    "library": "/lib/x86_64-linux-gnu/libc.so.6",
}
"""Where Debian's own kernel looks for what it is linked to."""


class UmlBackend(LayeredBackend):
    """Boots one user-mode Linux for each sandbox."""

    name = "uml"
    isolation_class = IsolationClass.USER_MODE_KERNEL
    capabilities = frozenset(
        {
            *(Capability.COLD_BOOT, Capability.OWN_KERNEL),
            *(Capability.LAYERS, Capability.NETWORK),
        }
    )
    processors_max = 1
    memory_mib = 128

    def __init__(
        self,
        cache: Path | None = None,
        layer: str | Path = "",
        needs: MachineNeeds = DEFAULT_NEEDS,
    ) -> None:
        super().__init__(cache, layer, needs)
        self.assets = self._base
        kinds = ("kernel", *(("initramfs", "loader", "library") if self.assets.is_debian else ()))
        files = {kind: self._folder / getattr(self.assets, kind) for kind in kinds} | self._files
        self._confinement = Confinement(
            self._folder / self.assets.launcher,
            files,
            self._mounts(),
            calls=allow_only(UML_CALLS.values()),
            copies=DEBIAN_LIBRARIES if self.assets.is_debian else {},
            memory_mib=self.needs.memory_mib + MARGIN_MIB + OVERHEAD_MIB,
            keeps_addresses=True,
        )
        self._info = self._record(self.assets.kernel_digest, self._confinement)

    def _mounts(self) -> list[str]:
        """Return bubblewrap's options. Its own process is pid 1: signals from inside end no pid 1.

        A kernel that panics ends itself by SIGABRT; as pid 1 it would try that for ever. The
        guest's memory is a file in /tmp: the host never holds more for a machine.
        """
        size = (self.needs.memory_mib + MARGIN_MIB) << 20
        return [
            *("--proc", "/proc"),
            *("--size", str(size), "--tmpfs", "/tmp"),  # noqa: S108
            *("--setenv", "TMPDIR", "/tmp", "--setenv", "HOME", "/tmp"),  # noqa: S108
            *("--chdir", "/tmp"),  # noqa: S108
        ]

    def _program(self, guest_fd: int, files: Mapping[str, str]) -> list[str]:
        needs = self.needs
        layer = f"ubd1r={files['layer']}" if self._layer else ""
        debian = (f"initrd={files['initramfs']}", *DEBIAN_ROOT) if self.assets.is_debian else ()
        return [
            *(files["kernel"], f"ubd0r={files['image']}", *(debian or ROOT)),
            *((layer, "penstock_layer=/dev/ubdb") if layer else ()),
            *((f"penstock_disk_mib={needs.disk_mib}",) if needs.disk_mib else ()),
            *(
                f"ssl0=fd:{guest_fd}",
                "ssl=null",
                "con=null",
                "con0=null",
                "seccomp=on",
                f"mem={needs.memory_mib}M",
            ),
            *("quiet", "panic=1", f"lpj={LOOPS_PER_JIFFY}"),
            *("nbd.nbds_max=0", "loop.max_loop=0"),
        ]

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> GuestSandbox:
        """See `SandboxBackend.start`; raises `ImageAbsent` if the layer is gone."""
        try:
            return await start_machine(
                self._confinement, self._program, self._info, cpu=cpu, timeout_s=timeout_s
            )
        except SandboxDied:
            self._check_layer()
            raise
