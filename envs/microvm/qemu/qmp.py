"""QEMU's machine protocol (QMP), as much of it as saving a machine takes.

Not the library `qemu.qmp` (0.0.6): it sends descriptors by asyncio's private `_sock`, which
uvloop's transports do not have.
"""

import asyncio
import os
import socket
from typing import Any

import msgspec

from penstock.envs.sandbox import SandboxDied, SandboxError, SandboxTimeout
from penstock.messages.reading.parsing import parse_json

ANSWER_BYTES_MAX = 1 << 20
DEADLINE_S = 10.0


class QmpError(SandboxError):
    """QEMU refused a command; the text has its reason."""


class Qmp:
    """Commands to one QEMU, one at a time.

    The first command enters command mode: most machines are never saved and need no monitor.

    Args:
        ours: Our end of a socket pair; this object's from now on.

    Example:
        await Qmp(ours).run("cont")

    """

    def __init__(self, ours: socket.socket) -> None:
        self._ours = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._in_command_mode = False
        self._num_commands = 0
        self._turn = asyncio.Lock()

    async def run(
        self, command: str, *, deadline_s: float = DEADLINE_S, fd: int = -1, **arguments: Any
    ) -> Any:
        """Run one command and return what it returns.

        Args:
            command: Its name; `arguments` are its own.
            deadline_s: Until the answer.
            fd: A descriptor to send with it.

        Raises:
            QmpError: QEMU refused it.
            SandboxDied: QEMU ended.
            SandboxTimeout: No answer in time.

        """
        try:
            async with self._turn, asyncio.timeout(deadline_s):
                await self._enter_command_mode()
                answer = await self._ask(command, arguments, fd)
        except TimeoutError:
            raise SandboxTimeout(f"QEMU: no answer to {command} in {deadline_s:g} s") from None
        except (ConnectionError, ValueError) as error:
            raise SandboxDied(f"QEMU's monitor: {error}") from error
        if "error" in answer:
            raise QmpError(f"QEMU: {command}: {answer['error']['desc']}")
        return answer["return"]

    async def _enter_command_mode(self) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._ours, limit=ANSWER_BYTES_MAX)
        if not self._in_command_mode:
            await self._ask("qmp_capabilities", {}, -1)
            self._in_command_mode = True

    async def _ask(self, command: str, arguments: dict[str, Any], fd: int) -> dict[str, Any]:
        """Skip all but this command's answer: events, and late answers to earlier commands."""
        self._num_commands += 1
        words = {"execute": command, "arguments": arguments, "id": self._num_commands}
        line = msgspec.json.encode(words) + b"\n"
        socket.send_fds(self._ours, [line], [fd] if fd >= 0 else [])
        while (answer := await self._next()).get("id") != words["id"]:
            pass
        return answer

    async def _next(self) -> dict[str, Any]:
        assert self._streams is not None
        line = await self._streams[0].readline()
        if not line:
            raise ConnectionError("closed")
        return parse_json(line, dict[str, Any], "QMP")

    async def save_devices(self) -> bytes:
        """Return the state of a stopped machine's processor and devices, without its memory."""
        with os.fdopen(os.memfd_create("devices", os.MFD_CLOEXEC), "rb") as state:
            path = f"/proc/self/fd/{state.fileno()}"
            with open(path, "wb") as writable:  # noqa: ASYNC230, PTH123 - a descriptor, not a disk
                added = await self.run("add-fd", fd=writable.fileno())
            name = f"/dev/fdset/{added['fdset-id']}"
            await self.run("xen-save-devices-state", filename=name, live=False)
            await self.run("remove-fd", **{"fdset-id": added["fdset-id"]})
            return state.read()

    def close(self) -> None:
        """Drop the connection."""
        if self._streams is None:
            self._ours.close()
        else:
            self._streams[1].close()
