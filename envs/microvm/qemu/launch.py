"""Starting QEMU's process: one that boots, or one that waits for a saved machine's devices."""

import contextlib
import socket

from penstock.envs.microvm.host_process import start_process
from penstock.envs.microvm.qemu.command import QemuCommand
from penstock.envs.microvm.qemu.memory import Memory
from penstock.envs.sandbox import SandboxDied

DEVICES_BYTES_MAX = 1 << 20
"""Of a socket that QEMU reads when it comes to it; a machine's devices take 13 KB."""


class Launched:
    """A QEMU and our ends of its lines.

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

    def go_on_from(self, devices: bytes) -> None:
        """Hand over the devices' state; the machine goes on as soon as QEMU has read it.

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
        """Close what only a starting machine needs; its line and monitor are others' by then."""
        self._devices.close()


def _pair(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    return ours.enter_context(one), theirs.enter_context(other)
