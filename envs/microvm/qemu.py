"""QEMU's small machine in bubblewrap: slow without KVM, but its memory can be copied and saved.

```
 template: boots once, freezes, stops; its memory is a sealed memfd, its devices a second one
     └─ clone: maps that memory copy-on-write, loads the devices, goes on, thaws   = `start`
           └─ checkpoint: freezes, stops, saves all of its state to a folder, goes on, thaws
                 └─ copy: loads it all, goes on, thaws; as often as one likes      = `restore`
```
"""

import asyncio
import os
from pathlib import Path

from penstock.envs.microvm.assets import digest_bytes, find_bubblewrap, load_assets
from penstock.envs.microvm.checkpoint import STATE, load_checkpoint
from penstock.envs.microvm.layers import image_digest, layered
from penstock.envs.microvm.qemu_assets import find_qemu, load_qemu_assets
from penstock.envs.microvm.qemu_machine import (
    Memory,
    QemuMachine,
    Template,
    boot,
    make_template,
    resume,
)
from penstock.envs.sandbox import BackendUnavailable, Capability, IsolationClass
from penstock.messages.rollout import SandboxRecord

MEM_MIB = 256
MACHINE = "microvm,x-option-roms=off,rtc=on,pit=on,pic=on,acpi=on,isa-serial=off"


def _tsc_khz() -> int:
    """Return the processor's frequency; the guest would else measure it, and hang at times."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return round(float(line.partition(":")[2]) * 1000)
    raise BackendUnavailable("/proc/cpuinfo names no processor frequency")


def _disk(path: str) -> str:
    """Return a drive's options.

    Unlocked: nobody may write the file, and a user-mode machine's lock on it would keep QEMU out.
    """
    return f"file={path},file.locking=off,format=raw,if=none,readonly=on"


class QemuTcgBackend:
    """Starts machines as copies of one that it boots first, with an emulated processor.

    Args:
        cache: Folder with kernel, image and agent; default `assets.vm_cache_dir()`.
        mem_mib: The guest's memory; three quarters of it may hold files.
        layer: Name of an image layer above the base (`layers.py`).

    Raises:
        BackendUnavailable: QEMU, bubblewrap, the kernel or the image is missing.

    """

    name = "qemu-tcg"
    isolation_class = IsolationClass.EMULATED_VM
    capabilities = frozenset(
        {
            *(Capability.COLD_BOOT, Capability.OWN_KERNEL, Capability.RAM_SNAPSHOT),
            *(Capability.FORK, Capability.CHECKPOINT),
        }
    )
    accelerator = "tcg,thread=multi,tb-size=64"
    devices: tuple[str, ...] = ()
    """Of the host, that the confined process may open."""
    template_deadline_s = 120.0
    """A cold boot takes 1.5 s on a free core, and many times that on a busy host."""

    def __init__(self, cache: Path | None = None, mem_mib: int = MEM_MIB, layer: str = "") -> None:
        folder, self._base = load_assets(cache)
        if self._base.stock:
            raise BackendUnavailable("QEMU machines need the erofs image, which was not built")
        qemu_folder, self.assets = load_qemu_assets(cache)
        self._layer = layered(layer, cache, stock=self._base.stock)
        self._image_digest = image_digest(self._base.image_digest, self._layer)
        self._mem_mib = mem_mib
        self._template: Template | None = None
        self._making = asyncio.Lock()
        self._prefix = [
            find_bubblewrap(),
            *("--unshare-all", "--die-with-parent", "--new-session"),
            *("--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--clearenv"),
            *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
            *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
            *("--ro-bind", str(qemu_folder / self.assets.kernel), "/vm/kernel"),
            *("--ro-bind", str(qemu_folder / self.assets.initramfs), "/vm/initramfs"),
            *("--ro-bind", str(folder / self._base.image), "/vm/image"),
            *(("--ro-bind", str(self._layer[0]), "/vm/layer") if self._layer else ()),
            *("--proc", "/proc", "--dev", "/dev"),
            *(part for path in self.devices for part in ("--dev-bind", path, path)),
            *("--", find_qemu()),
        ]
        self.machine_digest = digest_bytes(
            *(text.encode() for text in (self.accelerator, MACHINE, str(mem_mib))),
            *(text.encode() for text in (self.assets.kernel_digest, self._image_digest)),
        )

    def command(self, guest_fd: int, monitor_fd: int, memory: Memory, *, paused: bool) -> list[str]:
        """Return the command line of one QEMU.

        Args:
            guest_fd: QEMU's end of the guest agent's line.
            monitor_fd: QEMU's end of its monitor.
            memory: What the guest's memory is made of.
            paused: Wait for a state to be loaded, in place of booting.

        """
        words = f"quiet panic=-1 reboot=t tsc_early_khz={_tsc_khz()}"
        layer = ("-drive", f"id=layer,{_disk('/vm/layer')}")
        if self._layer:
            words += " penstock_layer=/dev/vdb"
        return [
            *self._prefix,
            *("-M", f"{MACHINE},memory-backend=ram", "-accel", self.accelerator, "-cpu", "max"),
            *("-m", f"{self._mem_mib}M", "-object", memory.object_option(self._mem_mib)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny"),
            *("-kernel", "/vm/kernel", "-initrd", "/vm/initramfs", "-append", words),
            *("-drive", f"id=image,{_disk('/vm/image')}"),
            *("-device", "virtio-blk-device,drive=image"),
            *((*layer, "-device", "virtio-blk-device,drive=layer") if self._layer else ()),
            *("-device", "virtio-serial-device"),
            *("-chardev", f"socket,id=line,fd={guest_fd}"),
            *("-device", "virtserialport,chardev=line,name=penstock"),
            *("-chardev", f"socket,id=monitor,fd={monitor_fd}"),
            *("-mon", "chardev=monitor,mode=control"),
            *(("-incoming", "defer") if paused else ()),
        ]

    def record(self, boot_ms: float) -> SandboxRecord:
        """Return what a machine's trajectories say of it."""
        return SandboxRecord(
            backend=self.name,
            isolation_class=self.isolation_class,
            kernel_digest=self.assets.kernel_digest,
            image_digest=self._image_digest,
            boot_ms=boot_ms,
        )

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> QemuMachine:
        """See `Backend.start`; the first call also boots the template, beyond `timeout_s`."""
        async with self._making:
            if self._template is None:
                self._template = await make_template(self, deadline_s=self.template_deadline_s)
        template = self._template
        with template.open_state() as state:
            return await resume(
                self, template.memory, state, template.line, cpu=cpu, timeout_s=timeout_s
            )

    async def cold_boot(self, *, cpu: int | None = None, timeout_s: float = 60.0) -> QemuMachine:
        """Boot one machine from its kernel."""
        return await boot(self, Memory(), cpu=cpu, timeout_s=timeout_s)

    async def restore(
        self, folder: Path, *, cpu: int | None = None, timeout_s: float = 10.0
    ) -> QemuMachine:
        """See `SavingBackend.restore`."""
        saved = load_checkpoint(folder, backend=self.name, machine_digest=self.machine_digest)
        with (folder / STATE).open("rb") as state:
            return await resume(self, Memory(), state, saved.line, cpu=cpu, timeout_s=timeout_s)


class QemuKvmBackend(QemuTcgBackend):
    """The same with the processor's own virtualization, where KVM works."""

    name = "qemu-kvm"
    isolation_class = IsolationClass.HARDWARE_VM
    accelerator = "kvm"
    devices = ("/dev/kvm",)
    template_deadline_s = 8.0
    """Some hosts open KVM and then emulate it, at a hundredth of the speed: of no use."""

    def __init__(self, cache: Path | None = None, mem_mib: int = MEM_MIB, layer: str = "") -> None:
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            raise BackendUnavailable("/dev/kvm is absent, or may not be opened by this user")
        super().__init__(cache, mem_mib, layer)
