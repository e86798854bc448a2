"""One QEMU machine: booted, copied, saved. `backend.py` combines these.

QEMU's machine protocol (QMP), as much of it as saving a machine takes.

Not the library `qemu.qmp` (0.0.6), which also needs a workaround under uvloop: see
docs/decisions/libraries.md.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.microvm.checkpoint import MachineCheckpoint, save_manifest
from penstock.envs.microvm.connection import GuestConnection
from penstock.envs.microvm.machine import GuestSandbox, booted
from penstock.envs.microvm.protocol import GuestIdentity, LineState
from penstock.envs.microvm.qemu.command import Launched, QemuCommand
from penstock.envs.microvm.qemu.memory import (
    Mapping,
    Memory,
    SavedMachine,
    copy_data,
    copy_own_pages,
    find_mapping,
)
from penstock.envs.sandbox import SandboxDied, SandboxError, SandboxFileError, SandboxTimeout
from penstock.messages.reading.parsing import parse_json
from penstock.messages.rollout import SandboxRecord

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


KEPT_MAX = 2
"""Checkpoints whose memory is kept at hand, each some 70 MB of it."""
SETTLE_S = 1.0
"""Pause before the template is saved: its kernel measures the processor's clock for a second, and
ticks every 4 ms until then, which no copy has to repeat.
"""


class MachineKind(msgspec.Struct, frozen=True, kw_only=True):
    """What all machines of one backend share."""

    digest: str
    """Digest of everything that a saved machine depends on."""
    command: QemuCommand
    info: SandboxRecord
    """A machine's record, but for its boot time."""
    kept: dict[str, SavedMachine] = {}
    """Token of a checkpoint -> its memory, at hand for further copies; oldest first."""

    def keep(self, token: str, saved: SavedMachine) -> None:
        """Keep a checkpoint's memory at hand, in place of the oldest."""
        self.kept.pop(token, None)
        self.kept[token] = saved
        if len(self.kept) > KEPT_MAX:
            self.kept.pop(next(iter(self.kept)))


class QemuMachine(GuestSandbox):
    """A `SavingMachine`.

    Args:
        kind: Shared with all machines of its backend.
        connection: To its guest agent.
        launched: Its process and monitor.
        memory: Its own memory is a private mapping of this.

    """

    def __init__(
        self, kind: MachineKind, connection: GuestConnection, launched: Launched, memory: Memory
    ) -> None:
        super().__init__(connection, launched.process, kind.info)
        self.monitor = Qmp(launched.monitor)
        self._kind = kind
        self._base = memory
        self._saving = asyncio.Lock()

    async def connected(self) -> None:
        """Wait for the hello of a guest that boots."""
        await self._connection.ready

    async def become(self, identity: GuestIdentity, *, timeout_s: float) -> None:
        """Thaw a frozen guest, as the machine it was or as a new one."""
        await self._connection.thaw(identity, timeout_s=timeout_s)

    async def stand_by(self, *, settle_s: float = 0.0) -> LineState:
        """Freeze the guest agent and stop the processor, `settle_s` later."""
        line = await self._connection.freeze(timeout_s=self.hang_grace_s)
        await asyncio.sleep(settle_s)
        await self.monitor.run("stop")
        return line

    async def take_up(self, *, asked_at: float, timeout_s: float) -> None:
        """Resume from `stand_by` as a new machine; it ends if that takes too long."""
        try:
            await self.monitor.run("cont", deadline_s=timeout_s)
            await self.become(_copys_identity(self._connection.epoch + 1), timeout_s=timeout_s)
        except BaseException:
            await self.close()
            raise
        self.info = booted(self._kind.info, asked_at)

    async def _save(self) -> tuple[SavedMachine, float]:
        """Save, and resume as the machine it was, also when saving failed.

        The host is slow to provide fresh memory: so all is copied once while the guest runs, and
        its own pages again over that copy while it is paused.
        """
        memory = Memory(self._kind.command.mem_bytes)
        mapping = await asyncio.to_thread(self._copy_beforehand, memory)
        started = time.perf_counter()
        try:
            line = await self.stand_by()
            copying = asyncio.to_thread(copy_own_pages, mapping, memory)
            devices, _ = await asyncio.gather(self.monitor.save_devices(), copying)
        finally:
            await self.monitor.run("cont")
            await self.become(
                GuestIdentity(epoch=self._connection.epoch), timeout_s=self.hang_grace_s
            )
        pause_ms = (time.perf_counter() - started) * 1000
        return SavedMachine(memory, devices, line), pause_ms

    def _copy_beforehand(self, memory: Memory) -> Mapping:
        mapping = find_mapping(self.process.pid, self._base)
        copy_data(self._base.fd, memory.fd)
        copy_own_pages(mapping, memory)
        return mapping

    async def checkpoint(self, folder: Path) -> None:
        """See `SavingMachine.checkpoint`. The machine waits only for memory, not for the disk."""
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, mode=0o700)
        except FileExistsError:
            raise SandboxFileError(f"checkpoint {folder}: exists already") from None
        try:
            async with self._saving:
                saved, pause_ms = await self._save()
            await asyncio.to_thread(saved.write_out, folder)
            checkpoint = MachineCheckpoint(
                backend=self._kind.info.backend,
                machine_digest=self._kind.digest,
                line=saved.line,
                num_bytes=len(saved.devices),
                pause_ms=pause_ms,
                token=uuid.uuid4().hex,
            )
            await asyncio.to_thread(save_manifest, folder, checkpoint)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._kind.keep(checkpoint.token, saved)

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self.monitor.close()
        await super().close()


def _copys_identity(epoch: int) -> GuestIdentity:
    """Return a copy's identity; it keeps the template's host name."""
    return GuestIdentity.new(epoch, hostname="")


@contextlib.asynccontextmanager
async def _connected(
    kind: MachineKind, launched: Launched, memory: Memory, line: LineState | None, timeout_s: float
) -> AsyncGenerator[QemuMachine]:
    """Connect to a QEMU; an error in the block, or a timeout, ends it."""
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: GuestConnection(launched.process.last_words, line), sock=launched.line
    )
    machine = QemuMachine(kind, connection, launched, memory)
    try:
        async with asyncio.timeout(timeout_s):
            yield machine
    except BaseException as error:
        words = launched.process.last_words()
        await machine.close()
        if isinstance(error, TimeoutError):
            raise SandboxTimeout(f"not ready within {timeout_s:g} s; {words}") from error
        if isinstance(error, SandboxDied):
            raise SandboxDied(f"{error}; {words}") from error
        raise
    finally:
        launched.close_devices()


async def resume(
    kind: MachineKind, saved: SavedMachine, *, asked_at: float, cpu: int | None, timeout_s: float
) -> QemuMachine:
    """Start a new machine that resumes from a saved one.

    Args:
        kind: Of both.
        saved: What it resumes from.
        asked_at: Time of the request by `time.perf_counter`, for the record.
        cpu: Host CPU to pin it to.
        timeout_s: Until the guest has answered.

    """
    launched = Launched(kind.command, saved.memory, boots=False, cpu=cpu)
    async with _connected(kind, launched, saved.memory, saved.line, timeout_s) as machine:
        launched.load_devices(saved.devices)
        await machine.become(_copys_identity(saved.line.epoch + 1), timeout_s=timeout_s)
    machine.info = booted(kind.info, asked_at)
    return machine


async def make_template(kind: MachineKind, *, deadline_s: float) -> SavedMachine:
    """Boot a machine, save it, end it."""
    memory = Memory(kind.command.mem_bytes)
    launched = Launched(kind.command, memory, boots=True, cpu=None)
    async with _connected(kind, launched, memory, None, deadline_s) as machine:
        await machine.connected()
        await machine.become(GuestIdentity.new(0), timeout_s=deadline_s)
    try:
        line = await machine.stand_by(settle_s=SETTLE_S)
        devices = await machine.monitor.save_devices()
    finally:
        await machine.close()
    return SavedMachine(memory, devices, line)
