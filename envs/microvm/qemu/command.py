"""QEMU's process: its command line, confined by bubblewrap, and its start.

One process boots; another waits for a saved machine's devices.
"""

import contextlib
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from penstock.envs.microvm.confinement.confinement import Confinement
from penstock.envs.microvm.confinement.filters import REFUSED_CALLS, refuse_only
from penstock.envs.microvm.images.assets import QemuAssets
from penstock.envs.microvm.qemu.memory import Memory
from penstock.envs.sandbox import BackendUnavailable, SandboxDied
from penstock.messages.task import MachineNeeds

PROGRAM = "qemu-system-x86_64"
MACHINE = (
    "microvm,x-option-roms=off,rtc=on,pit=on,pic=on,acpi=on,isa-serial=off,suppress-vmdesc=on"
    ",ioapic2=off"
)
"""The devices' state has no description of itself, since the same QEMU loads it; and there are
slots for 8 devices, not 24, each of which takes time to create.
"""
_LIBRARIES = (
    *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--dev", "/dev"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
)
"""Libraries of the host that Debian's QEMU needs; the one built for these machines needs none."""
OVERHEAD_MIB = 512
"""What QEMU needs besides the guest's memory: translated code, devices, the host's page tables."""
DEVICES_BYTES_MAX = 1 << 20
"""Send buffer of the socket that QEMU reads once it is up; a machine's devices take 13 KB."""


def find_qemu() -> str:
    """Return the path of Debian's QEMU.

    Raises:
        BackendUnavailable: It is not installed.

    """
    path = shutil.which(PROGRAM)
    if path is None:
        raise BackendUnavailable(f"{PROGRAM} is missing: {QemuAssets.how_to_get}")
    return path


def _clock() -> str:
    """Return the guest kernel's options about the processor's clock.

    Its frequency, since measuring it hangs at times; and that it is reliable: on a busy host ticks
    are late, and the kernel would trust them more and use steps of 4 ms from then on.
    """
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            khz = round(float(line.partition(":")[2]) * 1000)
            return f"tsc_early_khz={khz} tsc=reliable"
    raise BackendUnavailable("/proc/cpuinfo names no processor frequency")


def _disk(name: str, path: str) -> list[str]:
    """Return the options of one drive.

    Unlocked: the file is read-only, and a user-mode machine's lock on it would keep QEMU out.
    """
    drive = f"file={path},id={name},file.locking=off,format=raw,if=none,readonly=on"
    return ["-drive", drive, "-device", f"virtio-blk-device,drive={name}"]


class QemuCommand:
    """Starts the processes of one kind of machine.

    Args:
        launcher: See `Confinement`.
        files: `kernel`, `initramfs` and `image`; `layer` if there is one; `program` and `firmware`
            if QEMU was built for these machines, which then sees no other file of the host.
        needs: Size of the machines, every number set.
        accelerator: QEMU's `-accel` option.
        devices: Device files of the host that the confined process may open.

    Raises:
        BackendUnavailable: QEMU or bubblewrap is missing.

    """

    def __init__(
        self,
        launcher: Path,
        files: Mapping[str, Path],
        *,
        needs: MachineNeeds,
        accelerator: str,
        devices: tuple[str, ...] = (),
    ) -> None:
        self.mem_bytes = needs.memory_mib << 20
        self._needs = needs
        self._accelerator = accelerator
        mounts = [
            *("--proc", "/proc", *(() if "program" in files else _LIBRARIES)),
            *(part for path in devices for part in ("--dev-bind", path, path)),
        ]
        self._debians = "" if "program" in files else find_qemu()
        self.confinement = Confinement(
            launcher,
            files,
            mounts,
            calls=refuse_only(REFUSED_CALLS.values()),
            memory_mib=needs.memory_mib + OVERHEAD_MIB,
            own_user=all(Path(device).stat().st_mode & 6 == 6 for device in devices),
        )

    def __call__(  # noqa: PLR0913
        self,
        line: int,
        files: Mapping[str, str],
        *,
        monitor: int,
        devices: int,
        memory: int,
        boots: bool,
    ) -> list[str]:
        """Return one command line.

        Args:
            line: Descriptor of QEMU's end of the guest agent's line.
            files: Their paths inside.
            monitor: QEMU's end of its monitor.
            devices: Where it reads the devices' state, if it does not boot.
            memory: The guest's; written by one that boots, else mapped privately.
            boots: Whether it boots from its kernel; else it waits for a state.

        """
        disks = {name: files[name] for name in ("image", "layer") if name in files}
        share = "on" if boots else "off"
        ram = f"memory-backend-file,id=ram,size={self.mem_bytes},mem-path=/proc/self/fd/{memory}"
        program = (
            (self._debians,) if self._debians else (files["program"], "-bios", files["firmware"])
        )
        return [
            *program,
            *("-M", f"{MACHINE},memory-backend=ram", "-accel", self._accelerator, "-cpu", "max"),
            *("-m", f"{self._needs.memory_mib}M", "-smp", str(self._needs.processors)),
            *("-object", f"{ram},share={share}"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny"),
            *("-kernel", files["kernel"], "-initrd", files["initramfs"]),
            *("-append", self._words(has_layer="layer" in files)),
            *(part for name, path in disks.items() for part in _disk(name, path)),
            *("-device", "virtio-serial-device"),
            *("-chardev", f"socket,id=line,fd={line}"),
            *("-device", "virtserialport,chardev=line,name=penstock"),
            *("-chardev", f"socket,id=monitor,fd={monitor}"),
            *("-mon", "chardev=monitor,mode=control"),
            *("-global", "migration.send-configuration=off"),
            *(() if boots else ("-incoming", f"fd:{devices}")),
        ]

    def _words(self, *, has_layer: bool) -> str:
        """Return the guest kernel's options."""
        words = f"quiet panic=-1 reboot=t {_clock()}"
        if has_layer:
            words += " penstock_layer=/dev/vdb"
        if self._needs.disk_mib:
            words += f" penstock_disk_mib={self._needs.disk_mib}"
        return words


class Launched:
    """A QEMU process and our ends of its lines.

    It boots with an empty memory, or maps a saved one and waits for the devices' state.

    Raises:
        SandboxDied: The host has no room for it, or its program is gone.

    """

    def __init__(
        self, command: QemuCommand, memory: Memory, *, boots: bool, cpu: int | None
    ) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self.monitor, monitor = _pair(ours, theirs)
                self._devices, devices = _pair(ours, theirs)
            except OSError as error:
                raise SandboxDied(f"no machine could be started: {error}") from error
            self._devices.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, DEVICES_BYTES_MAX)
            ends = {"monitor": monitor.fileno(), "devices": devices.fileno(), "memory": memory.fd}
            self.process, self.line = command.confinement.start(
                lambda line, files: command(line, files, **ends, boots=boots),
                cpu,
                list(ends.values()),
            )
            ours.pop_all()

    def load_devices(self, devices: bytes) -> None:
        """Hand over the devices' state; the machine resumes as soon as QEMU has read it.

        Raises:
            SandboxDied: QEMU has ended.

        """
        self._devices.setblocking(False)
        try:
            sent = self._devices.send(devices)
        except OSError as error:
            raise SandboxDied(f"{error}; {self.process.last_words()}") from error
        if sent < len(devices):
            raise SandboxDied(f"a machine's devices take {len(devices)} bytes, more than expected")
        self._devices.shutdown(socket.SHUT_WR)

    def close_devices(self) -> None:
        """Close what only a starting machine needs; its line and monitor are in use."""
        self._devices.close()


def _pair(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    return ours.enter_context(one), theirs.enter_context(other)
