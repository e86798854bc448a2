"""User-mode Linux in bubblewrap: a separate kernel as one unprivileged process.

Its seccomp mode is fast but no boundary by itself (a program may reach its own kernel's memory),
so it always runs inside bubblewrap: own user, pid, net, ipc, uts and mount namespaces, no
network, no capabilities, nothing of the host's files but the kernel and the image, read-only.
"""

from pathlib import Path

from penstock.envs.microvm.images.assets import find_bubblewrap, load_assets
from penstock.envs.microvm.images.layers import check_there, image_digest, layered
from penstock.envs.microvm.machine import GuestSandbox, start_machine
from penstock.envs.sandbox import Capability, IsolationClass, SandboxDied
from penstock.messages.rollout import SandboxRecord

MEM_MIB = 128
HOST_TMPFS_MARGIN_MIB = 16
"""The guest's memory is a file on this tmpfs; the host never holds more for a machine."""
LOOPS_PER_JIFFY = 30_000_000
"""Given, so that the kernel does not spend 80 ms on measuring it."""

ROOT = ("ubd0r=/vm/image", "root=/dev/ubda", "ro", "rootfstype=erofs")
STOCK_ROOT = ("ubd0=/tmp/cow,/vm/image", "root=/dev/ubda", "rw", "rootfstype=ext4")
"""Debian's own kernel can read ext4 alone; each machine writes to its own copy-on-write file."""
STOCK_LIBRARIES = (
    *("--ro-bind", "/usr/lib", "/usr/lib", "--ro-bind", "/usr/lib64", "/usr/lib64"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
)


class UmlBackend:
    """Boots one user-mode Linux for each sandbox.

    Args:
        cache: Folder with the kernel and the image; default `assets.vm_cache_dir()`.
        mem_mib: The guest's memory; three quarters of it may hold files.
        layer: An image layer above the base, by name or file (`images/layers.py`).

    Raises:
        BackendUnavailable: The kernel, the image, the layer or bubblewrap is missing.

    """

    name = "uml"
    isolation_class = IsolationClass.USER_MODE_KERNEL
    capabilities = frozenset(
        {
            *(Capability.COLD_BOOT, Capability.OWN_KERNEL),
            *(Capability.LAYERS, Capability.NETWORK),
        }
    )

    def __init__(
        self, cache: Path | None = None, mem_mib: int = MEM_MIB, layer: str | Path = ""
    ) -> None:
        folder, self.assets = load_assets(cache)
        self._mem_mib = mem_mib
        self._layer = layered(layer, cache, stock=self.assets.stock)
        self._info = SandboxRecord(
            backend=self.name,
            isolation_class=self.isolation_class,
            kernel_digest=self.assets.kernel_digest,
            image_digest=image_digest(self.assets.image_digest, self._layer),
            boot_ms=0.0,
        )
        self._prefix = [find_bubblewrap(), *self._confinement(folder), "--", "/linux"]

    def _confinement(self, folder: Path) -> list[str]:
        """Bubblewrap's options. Its own process is pid 1: signals from inside do not end a pid 1.

        A kernel that panics ends itself by SIGABRT; as pid 1 it would try that for ever.
        """
        size = (self._mem_mib + HOST_TMPFS_MARGIN_MIB) << 20
        return [
            *("--unshare-all", "--die-with-parent", "--new-session"),
            *("--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--clearenv"),
            *("--ro-bind", str(folder / self.assets.kernel), "/linux"),
            *("--ro-bind", str(folder / self.assets.image), "/vm/image"),
            *(("--ro-bind", str(self._layer), "/vm/layer") if self._layer else ()),
            *(STOCK_LIBRARIES if self.assets.stock else ()),
            *("--proc", "/proc"),
            *("--size", str(size), "--tmpfs", "/tmp"),  # noqa: S108
            *("--setenv", "TMPDIR", "/tmp", "--setenv", "HOME", "/tmp"),  # noqa: S108
            *("--chdir", "/tmp"),  # noqa: S108
        ]

    def _command(self, guest_fd: int) -> list[str]:
        return [
            *self._prefix,
            *(STOCK_ROOT if self.assets.stock else ROOT),
            *(("ubd1r=/vm/layer", "penstock_layer=/dev/ubdb") if self._layer else ()),
            *("init=/sbin/penstock-agent", f"ssl0=fd:{guest_fd}"),
            *("ssl=null", "con=null", "con0=null", "seccomp=on", f"mem={self._mem_mib}M"),
            *("quiet", "panic=1", f"lpj={LOOPS_PER_JIFFY}"),
            *("nbd.nbds_max=0", "loop.max_loop=0"),
        ]

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> GuestSandbox:
        """See `SandboxBackend.start`; raises `ImageAbsent` if the layer is gone."""
        try:
            return await start_machine(self._command, self._info, cpu=cpu, timeout_s=timeout_s)
        except SandboxDied:
            check_there(self._layer)
            raise
