"""Builds the command line of QEMU and starts its confined process.

A process either boots a kernel, or waits for the device state of a saved machine.
"""

import contextlib
import shutil
import socket
from collections.abc import Mapping, Sequence
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
"""Type of the machine. Its saved state carries no description (`suppress-vmdesc`), since the same
QEMU loads it; and without `ioapic2` it has slots for 8 devices instead of 24, each of which takes
time to create.
"""
_LIBRARIES = (
    *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--dev", "/dev"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
)
"""Mounts of the host's libraries for Debian's QEMU; the static one from the recipe needs none."""
OVERHEAD_MIB = 512
"""Memory beyond the guest's own: translated code, devices and page tables of the host."""
DEVICES_BYTES_MAX = 1 << 20
"""Send buffer of the socket from which QEMU reads the device state, which is about 13 KB."""


def find_qemu() -> str:
    """Return the path of Debian's QEMU.

    Raises:
        BackendUnavailable: QEMU is not installed.

    """
    path = shutil.which(PROGRAM)
    if path is None:
        raise BackendUnavailable(f"{PROGRAM} is missing: {QemuAssets.how_to_get}")
    return path


def _clock() -> str:
    """Return the options of the guest kernel for the processor's clock (TSC)."""
    # The frequency is given because measuring it sometimes hangs. Declared reliable because on a
    # busy host timer ticks are late, and the kernel would distrust the TSC instead of the ticks and
    # measure time in steps of 4 ms from then on.
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            khz = round(float(line.partition(":")[2]) * 1000)
            return f"tsc_early_khz={khz} tsc=reliable"
    raise BackendUnavailable("/proc/cpuinfo: expected a line 'cpu MHz', found none")


def _disk(name: str, path: str) -> list[str]:
    """Return the options of one read-only drive."""
    # No locking: user-mode machines hold a lock on the same image, which would keep QEMU out.
    drive = f"file={path},id={name},file.locking=off,format=raw,if=none,readonly=on"
    return ["-drive", drive, "-device", f"virtio-blk-device,drive={name}"]


class QemuCommand:
    """Builds command lines for one kind of machine, together with their confinement.

    Args:
        launcher: Path of the launcher; see `Confinement`.
        files: Paths by kind: `kernel`, `initramfs` and `image`; `layer0` and on; `program`
            and `firmware` if the recipe built QEMU, which then sees no other files of the host.
        needs: Size of the machines, with defaults filled in.
        accelerator: QEMU's `-accel` option.
        devices: Device files of the host that the confined process may open.
        layer_options: What the guest's kernel hands to the agent about layers.

    Raises:
        BackendUnavailable: QEMU or bubblewrap is missing.

    """

    def __init__(  # noqa: PLR0913 - what a machine is
        self,
        launcher: Path,
        files: Mapping[str, Path],
        *,
        needs: MachineNeeds,
        accelerator: str,
        devices: tuple[str, ...] = (),
        layer_options: Sequence[str] = (),
    ) -> None:
        self._layer_options = layer_options
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
        """Return the command line of one process.

        Args:
            line: Descriptor of QEMU's end of the guest agent's line.
            files: Paths by kind, as seen inside the confinement.
            monitor: Descriptor of QEMU's end of its monitor.
            devices: Descriptor from which QEMU reads the device state unless it boots.
            memory: Descriptor of the guest's memory.
            boots: Whether QEMU boots the kernel; otherwise it waits for a device state.

        """
        disks = {k: path for k, path in files.items() if k == "image" or k.startswith("layer")}
        # A machine that boots writes into the file, which becomes the template; copies map it
        # privately, so that their pages are their own.
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
            *("-append", self._kernel_options()),
            *(part for name, path in disks.items() for part in _disk(name, path)),
            *("-device", "virtio-serial-device"),
            *("-chardev", f"socket,id=line,fd={line}"),
            *("-device", "virtserialport,chardev=line,name=penstock"),
            *("-chardev", f"socket,id=monitor,fd={monitor}"),
            *("-mon", "chardev=monitor,mode=control"),
            *("-global", "migration.send-configuration=off"),
            *(() if boots else ("-incoming", f"fd:{devices}")),
        ]

    def _kernel_options(self) -> str:
        """Return the command line of the guest kernel."""
        options = f"quiet panic=-1 reboot=t {_clock()}"
        options += "".join(f" {option}" for option in self._layer_options)
        if self._needs.disk_mib:
            options += f" penstock_disk_mib={self._needs.disk_mib}"
        return options


class QemuProcess:
    """QEMU process with the host's ends of its sockets.

    It boots with an empty memory, or maps a saved one and waits for the device state.

    Raises:
        SandboxDied: The host cannot start the process, or QEMU's program is gone.

    """

    def __init__(
        self, command: QemuCommand, memory: Memory, *, boots: bool, cpu: int | None
    ) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self.monitor, monitor = _pair(ours, theirs)
                self._devices, devices = _pair(ours, theirs)
            except OSError as error:
                raise SandboxDied(f"cannot start a machine: {error}") from error
            # The whole state must fit: it is sent before QEMU reads, and nobody sends the rest.
            self._devices.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, DEVICES_BYTES_MAX)
            ends = {"monitor": monitor.fileno(), "devices": devices.fileno(), "memory": memory.fd}
            self.process, self.line = command.confinement.start(
                lambda line, files: command(line, files, **ends, boots=boots),
                cpu,
                list(ends.values()),
            )
            ours.pop_all()  # started: keep our ends open, QEMU has inherited its own

    def load_devices(self, devices: bytes) -> None:
        """Send the device state; the machine resumes as soon as QEMU has read it.

        Raises:
            SandboxDied: QEMU has ended, or the state exceeds the send buffer.

        """
        self._devices.setblocking(False)
        try:
            sent = self._devices.send(devices)
        except OSError as error:
            raise SandboxDied(f"{error}; {self.process.last_words()}") from error
        if sent < len(devices):
            raise SandboxDied(f"device state of {len(devices)} bytes: only {sent} fit the buffer")
        self._devices.shutdown(socket.SHUT_WR)

    def close_devices(self) -> None:
        """Close the socket for the device state, which only a starting machine needs."""
        self._devices.close()


def _pair(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    our_end, their_end = socket.socketpair()
    return ours.enter_context(our_end), theirs.enter_context(their_end)
