"""Backend that runs user-mode Linux in bubblewrap: a separate kernel in one unprivileged process.

The kernel's seccomp mode is fast but not a security boundary: its help text calls it insecure with
untrusted user space, because a program may reach the memory of its own kernel. The boundary is the
confinement around it (`confinement/`): namespaces, limits, and a filter that allows only the system
calls that user-mode Linux makes. It is meant for code that a policy writes; tasks from untrusted
sources should demand a hardware VM.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.envs.microvm.confinement.confinement import MARGIN_MIB, Confinement
from penstock.envs.microvm.confinement.filters import UML_CALLS, allow_only
from penstock.envs.microvm.images.layers import LayeredBackend
from penstock.envs.microvm.machine import GuestSandbox, start_machine
from penstock.envs.needs import DEFAULT_NEEDS
from penstock.envs.sandbox import Capability, IsolationClass, SandboxDied
from penstock.messages.task import MachineNeeds

OVERHEAD_MIB = 192
"""Memory of the host's kernel for mappings and page tables of up to 256 guest processes."""
LOOPS_PER_JIFFY = 30_000_000
"""Preset delay-loop value, which saves the 80 ms that the kernel would take to measure it."""

ROOT = ("root=/dev/ubda", "ro", "rootfstype=erofs", "init=/sbin/penstock-agent")
DEBIAN_ROOT = (
    *("penstock_image=/dev/ubda", "penstock_line=/dev/ttyS0"),
    # Skipped because they add a second to the boot: benchmarks, and file systems, security modules
    # and control groups that no machine uses.
    "initcall_blacklist=raid6_init,calibrate_xor_blocks,init_btrfs_fs,init_jfs_fs,init_xfs_fs",
    *("lsm=", "audit=0", "cgroup_disable=memory,cpu,io,pids,cpuset,freezer,devices"),
    "pty.legacy_count=0",
    # Attack surface that our own kernel is built without and no program in a machine needs.
    *("sysctl.kernel.unprivileged_bpf_disabled=1", "sysctl.kernel.io_uring_disabled=2"),
)
"""Kernel options for Debian's kernel, whose initramfs mounts the image."""
DEBIAN_LIBRARIES = {
    "loader": "/lib64/ld-linux-x86-64.so.2",
    "library": "/lib/x86_64-linux-gnu/libc.so.6",
}
"""Paths of the dynamic loader and the C library that Debian's kernel is linked to."""


class UmlBackend(LayeredBackend):
    """Boots one user-mode Linux per sandbox.

    Args:
        cache: See `LayeredBackend`, as for `layer` and `needs`.
        layer: As there.
        needs: As there.
        disks: Further files that are disks of the machine, after its layers.
        output: File that is its last disk and that it may write. With it the machine builds images
            (`oci/build.py`): its commands run as its root.

    """

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
        *,
        disks: Sequence[Path] = (),
        output: Path | None = None,
    ) -> None:
        super().__init__(cache, layer, needs)
        self.assets = self._base
        more = {f"disk{number}": path for number, path in enumerate(disks)}
        more |= {"output": output} if output else {}
        kinds = ("kernel", *(("initramfs", "loader", "library") if self.assets.is_debian else ()))
        files = {kind: self._folder / getattr(self.assets, kind) for kind in kinds}
        files |= self._files | more
        self._confinement = Confinement(
            self._folder / self.assets.launcher,
            files,
            self._mounts(),
            calls=allow_only(UML_CALLS.values()),
            copies=DEBIAN_LIBRARIES if self.assets.is_debian else {},
            memory_mib=self.needs.memory_mib + MARGIN_MIB + OVERHEAD_MIB,
            keeps_addresses=True,
            writable=("output",),
        )
        self._info = self._record(self.assets.kernel_digest, self._confinement)

    def _mounts(self) -> list[str]:
        """Return the bubblewrap options for mounts and environment.

        Bubblewrap's own process stays PID 1, not the kernel: a kernel that panics ends itself by
        SIGABRT, which PID 1 ignores, so it would keep trying forever.
        """
        # The guest's memory is a file in /tmp, so the size of /tmp bounds the machine's memory.
        size = (self.needs.memory_mib + MARGIN_MIB) << 20
        return [
            *("--proc", "/proc"),
            *("--size", str(size), "--tmpfs", "/tmp"),  # noqa: S108
            *("--setenv", "TMPDIR", "/tmp", "--setenv", "HOME", "/tmp"),  # noqa: S108
            *("--chdir", "/tmp"),  # noqa: S108
        ]

    def _program(self, guest_fd: int, files: Mapping[str, str]) -> list[str]:
        needs = self.needs
        layers = [path for kind, path in files.items() if kind.startswith(("layer", "disk"))]
        output = (f"ubd{len(layers) + 1}={files['output']}",) if "output" in files else ()
        debian = (f"initrd={files['initramfs']}", *DEBIAN_ROOT) if self.assets.is_debian else ()
        return [
            *(files["kernel"], f"ubd0r={files['image']}", *(debian or ROOT)),
            *(f"ubd{number}r={path}" for number, path in enumerate(layers, start=1)),
            *self._layer_options("/dev/ubd"),
            *((*output, "penstock_builder=1") if output else ()),
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
            machine = await start_machine(
                self._confinement, self._program, self._info, cpu=cpu, timeout_s=timeout_s
            )
        except SandboxDied:
            # A layer removed since the backend was opened is the likely cause: report it instead.
            self._check_layer()
            raise
        machine.settings = self.settings
        return machine
