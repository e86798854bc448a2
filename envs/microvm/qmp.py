"""QEMU's machine protocol, as much of it as starting, copying and saving a machine takes."""

import asyncio
import socket
from typing import Any, Self

import msgspec

from penstock.envs.sandbox import SandboxDied, SandboxError, SandboxTimeout

ANSWER_BYTES_MAX = 1 << 20
POLL_S = 0.001


class QmpError(SandboxError):
    """QEMU refused a command; the text has its reason."""


class Qmp:
    """Commands to one QEMU, one at a time; events are passed over.

    Example:
        qmp = await Qmp.open(our_end_of_a_socket_pair, deadline_s=10.0)
        await qmp.run("cont")

    """

    def __init__(
        self, ours: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._ours = ours
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, ours: socket.socket, *, deadline_s: float) -> Self:
        """Take the greeting and enter command mode; the socket is this object's from now on."""
        reader, writer = await asyncio.open_connection(sock=ours, limit=ANSWER_BYTES_MAX)
        qmp = cls(ours, reader, writer)
        try:
            async with asyncio.timeout(deadline_s):
                await qmp._next()
            await qmp.run("qmp_capabilities", deadline_s=deadline_s)
        except BaseException:
            qmp.close()
            raise
        return qmp

    async def run(self, command: str, *, deadline_s: float = 10.0, **arguments: Any) -> Any:
        """Run one command and return what it returns.

        Raises:
            QmpError: QEMU refused it.
            SandboxDied: QEMU ended.
            SandboxTimeout: No answer in time.

        """
        words = {"execute": command, "arguments": arguments} if arguments else {"execute": command}
        try:
            async with self._turn, asyncio.timeout(deadline_s):
                self._writer.write(msgspec.json.encode(words) + b"\n")
                answer = await self._answer()
        except TimeoutError:
            raise SandboxTimeout(f"QEMU: no answer to {command} in {deadline_s:g} s") from None
        if "error" in answer:
            raise QmpError(f"QEMU: {command}: {answer['error']['desc']}")
        return answer["return"]

    async def _answer(self) -> dict[str, Any]:
        while "event" in (answer := await self._next()):
            pass
        return answer

    async def _next(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError) as error:
            raise SandboxDied(f"QEMU's monitor: {error}") from error
        if not line:
            raise SandboxDied("QEMU closed its monitor")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    async def give_fd(self, name: str, fd: int) -> None:
        """Lend QEMU a descriptor under a name; it closes its own copy after use."""
        words = msgspec.json.encode({"execute": "getfd", "arguments": {"fdname": name}})
        async with self._turn, asyncio.timeout(10.0):
            socket.send_fds(self._ours, [words + b"\n"], [fd])
            answer = await self._answer()
        if "error" in answer:
            raise QmpError(f"QEMU: getfd: {answer['error']['desc']}")

    async def set_ignore_shared(self, on: bool) -> None:
        """Leave shared memory out of what is saved or loaded; both sides must agree on it."""
        wanted = [{"capability": "x-ignore-shared", "state": on}]
        await self.run("migrate-set-capabilities", capabilities=wanted)

    async def migrated(self, *, deadline_s: float) -> None:
        """Wait until the migration in hand, out or in, has ended well.

        Raises:
            QmpError: It failed.
            SandboxTimeout: It takes longer than `deadline_s`.

        """
        give_up_at = asyncio.get_running_loop().time() + deadline_s
        while asyncio.get_running_loop().time() < give_up_at:
            state = await self.run("query-migrate", deadline_s=deadline_s)
            match state.get("status"):
                case "completed":
                    return
                case "failed" | "cancelled":
                    raise QmpError(f"QEMU: migration failed: {state.get('error-desc', '')}")
            await asyncio.sleep(POLL_S)
        raise SandboxTimeout(f"QEMU: no end of a migration in {deadline_s:g} s")

    def close(self) -> None:
        """Drop the connection."""
        self._writer.close()
