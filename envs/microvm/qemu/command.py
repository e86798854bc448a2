"""QEMU's process: its command line, confined by bubblewrap, and its start.

One process boots; another waits for a saved machine's devices.
"""

import contextlib
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from penstock.envs.microvm.host_process import start_process
from penstock.envs.microvm.images.assets import QemuAssets, find_bubblewrap
from penstock.envs.microvm.qemu.memory import Memory
from penstock.envs.sandbox import BackendUnavailable, SandboxDied

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


def _disk(name: str) -> list[str]:
    """Return the options of one drive.

    Unlocked: the file is read-only, and a user-mode machine's lock on it would keep QEMU out.
    """
    drive = f"file=/vm/{name},id={name},file.locking=off,format=raw,if=none,readonly=on"
    return ["-drive", drive, "-device", f"virtio-blk-device,drive={name}"]


def _bind(name: str, path: Path) -> list[str]:
    seen = "bios-microvm.bin" if name == "firmware" else name  # as QEMU asks for it
    return ["--ro-bind", str(path), f"/vm/{seen}"]


class QemuCommand:
    """Makes the command lines of one kind of machine.

    Args:
        files: `kernel`, `initramfs` and `image`; `layer` if there is one; `program` and `firmware`
            if QEMU was built for these machines, which then sees no other file of the host.
        mem_bytes: The guest's memory.
        accelerator: QEMU's `-accel` option.
        devices: Device files of the host that the confined process may open.

    Raises:
        BackendUnavailable: QEMU or bubblewrap is missing.

    """

    def __init__(
        self,
        files: Mapping[str, Path],
        *,
        mem_bytes: int,
        accelerator: str,
        devices: tuple[str, ...] = (),
    ) -> None:
        self.mem_bytes = mem_bytes
        self._accelerator = accelerator
        self._disks = [name for name in ("image", "layer") if name in files]
        self._prefix = [
            find_bubblewrap(),
            *("--unshare-all", "--die-with-parent", "--new-session"),
            *("--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--clearenv"),
            *(part for name, path in files.items() for part in _bind(name, path)),
            *("--proc", "/proc", *(() if "program" in files else _LIBRARIES)),
            *(part for path in devices for part in ("--dev-bind", path, path)),
            *("--", *(("/vm/program", "-L", "/vm") if "program" in files else (find_qemu(),))),
        ]

    def __call__(
        self, line: int, *, monitor: int, devices: int, memory: int, boots: bool
    ) -> list[str]:
        """Return one command line.

        Args:
            line: Descriptor of QEMU's end of the guest agent's line.
            monitor: QEMU's end of its monitor.
            devices: Where it reads the devices' state, if it does not boot.
            memory: The guest's; written by one that boots, else mapped privately.
            boots: Whether it boots from its kernel; else it waits for a state.

        """
        words = f"quiet panic=-1 reboot=t {_clock()}"
        if "layer" in self._disks:
            words += " penstock_layer=/dev/vdb"
        share = "on" if boots else "off"
        ram = f"memory-backend-file,id=ram,size={self.mem_bytes},mem-path=/proc/self/fd/{memory}"
        return [
            *self._prefix,
            *("-M", f"{MACHINE},memory-backend=ram", "-accel", self._accelerator, "-cpu", "max"),
            *("-m", f"{self.mem_bytes >> 20}M", "-object", f"{ram},share={share}"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny"),
            *("-kernel", "/vm/kernel", "-initrd", "/vm/initramfs", "-append", words),
            *(part for name in self._disks for part in _disk(name)),
            *("-device", "virtio-serial-device"),
            *("-chardev", f"socket,id=line,fd={line}"),
            *("-device", "virtserialport,chardev=line,name=penstock"),
            *("-chardev", f"socket,id=monitor,fd={monitor}"),
            *("-mon", "chardev=monitor,mode=control"),
            *("-global", "migration.send-configuration=off"),
            *(() if boots else ("-incoming", f"fd:{devices}")),
        ]


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
            self.process, self.line = start_process(
                lambda line: command(line, **ends, boots=boots), cpu, list(ends.values())
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
