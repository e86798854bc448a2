"""Boots, copies and saves a single QEMU machine, which it controls over QEMU's monitor (QMP).

`Qmp` implements the few commands that saving a machine takes. It replaces the library `qemu.qmp`
(0.0.6), which needs a workaround under uvloop: see docs/decisions/libraries.md.
"""

import asyncio
import contextlib
import logging
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
from penstock.envs.microvm.images.layers import ImageSettings
from penstock.envs.microvm.machine import GuestSandbox, booted
from penstock.envs.microvm.protocol import GuestIdentity, LineState
from penstock.envs.microvm.qemu.command import QemuCommand, QemuProcess
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

log = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 1 << 20
DEADLINE_S = 10.0


class QmpError(SandboxError):
    """QEMU refused a command; the error has its reason."""


class Qmp:
    """Monitor connection to one QEMU; sends one command at a time.

    The first command negotiates: most machines are never saved and need no monitor.

    Args:
        ours: Host's end of a socket pair, which this object closes.

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
        """Run one command and return its result.

        Args:
            command: Name of the command.
            deadline_s: Maximum seconds until the answer.
            fd: Descriptor to send along; -1 for none.
            arguments: Arguments of the command.

        Raises:
            QmpError: QEMU refused the command.
            SandboxDied: QEMU ended.
            SandboxTimeout: No answer within `deadline_s`.

        """
        try:
            async with self._turn, asyncio.timeout(deadline_s):
                await self._enter_command_mode()
                answer = await self._ask(command, arguments, fd)
        except TimeoutError:
            raise SandboxTimeout(f"QEMU: no answer to {command} within {deadline_s:g} s") from None
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
        """Send a command and return its answer."""
        self._num_commands += 1
        request = {"execute": command, "arguments": arguments, "id": self._num_commands}
        line = msgspec.json.encode(request) + b"\n"
        socket.send_fds(self._ours, [line], [fd] if fd >= 0 else [])
        # Skips events, and late answers to commands that timed out.
        while (answer := await self._read_message()).get("id") != request["id"]:
            pass
        return answer

    async def _read_message(self) -> dict[str, Any]:
        assert self._streams is not None
        line = await self._streams[0].readline()
        if not line:
            raise ConnectionError("closed")
        return parse_json(line, dict[str, Any], "QMP")

    async def save_devices(self) -> bytes:
        """Return the state of a stopped machine's processors and devices, without its memory."""
        # The confined process shares no writable folder with the host: it writes to a descriptor.
        with os.fdopen(os.memfd_create("devices", os.MFD_CLOEXEC), "rb") as state:
            path = f"/proc/self/fd/{state.fileno()}"
            with open(path, "wb") as writable:  # noqa: ASYNC230, PTH123 - a descriptor, not a disk
                added = await self.run("add-fd", fd=writable.fileno())
            name = f"/dev/fdset/{added['fdset-id']}"
            await self.run("xen-save-devices-state", filename=name, live=False)
            await self.run("remove-fd", **{"fdset-id": added["fdset-id"]})
            return state.read()

    def close(self) -> None:
        """Close the connection."""
        if self._streams is None:
            self._ours.close()
        else:
            self._streams[1].close()


KEPT_MAX = 2
"""Maximum checkpoints whose memory stays cached, about 70 MB each."""
SETTLE_S = 1.0
"""Seconds to wait before the template is saved. Its kernel calibrates the processor's clock for a
second and ticks every 4 ms until then, which copies would otherwise repeat.
"""


class MachineKind(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that all machines of one backend share."""

    digest: str
    """Digest of everything that a saved machine depends on."""
    command: QemuCommand
    info: SandboxRecord
    """Record of a machine, without its boot time."""
    settings: ImageSettings | None = None
    """Settings of the container image that is its root, if there is one."""
    kept: dict[str, SavedMachine] = {}
    """Memory cached for further copies, by the token of its checkpoint; oldest first."""

    def keep(self, token: str, saved: SavedMachine) -> None:
        """Cache the memory of a checkpoint, evicting the oldest beyond `KEPT_MAX`."""
        self.kept.pop(token, None)
        self.kept[token] = saved
        if len(self.kept) > KEPT_MAX:
            self.kept.pop(next(iter(self.kept)))


class QemuMachine(GuestSandbox):
    """Machine that can be saved while it runs.

    Args:
        kind: Properties shared with all machines of the backend.
        connection: Connection to the guest agent.
        launched: Process and monitor of the machine.
        memory: File of which the machine's memory is a private mapping.

    """

    def __init__(
        self, kind: MachineKind, connection: GuestConnection, launched: QemuProcess, memory: Memory
    ) -> None:
        super().__init__(connection, launched.process, kind.info)
        self.settings = kind.settings
        self.monitor = Qmp(launched.monitor)
        self._kind = kind
        self._base = memory
        self._saving = asyncio.Lock()

    async def connected(self) -> None:
        """Wait for the hello of a booting guest."""
        await self._connection.ready

    async def become(self, identity: GuestIdentity, *, timeout_s: float) -> None:
        """Thaw a frozen guest, either as the same machine or as a new copy."""
        await self._connection.thaw(identity, timeout_s=timeout_s)

    async def stand_by(self, *, settle_s: float = 0.0) -> LineState:
        """Freeze the guest agent and, `settle_s` later, stop the processors."""
        line = await self._connection.freeze(timeout_s=self.hang_grace_s)
        await asyncio.sleep(settle_s)
        await self.monitor.run("stop")
        return line

    async def take_up(self, *, asked_at: float, timeout_s: float) -> None:
        """Resume from `stand_by` as a new machine; on failure or timeout the machine ends."""
        try:
            await self.monitor.run("cont", deadline_s=timeout_s)
            await self.become(_copy_identity(self._connection.epoch + 1), timeout_s=timeout_s)
        except BaseException:
            await self.close()
            raise
        self.info = booted(self._kind.info, asked_at)

    async def _save(self) -> tuple[SavedMachine, float]:
        """Save the machine; return the result and the milliseconds of the pause.

        It resumes as the same machine, even if saving fails.
        """
        # Copied twice: fresh memory is slow to get from the host, so the first copy allocates it
        # while the guest runs, and the paused guest waits only for its own pages to be overwritten.
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
        """See `SavingMachine.checkpoint`; writing to disk happens after the machine has resumed."""
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, mode=0o700)
        except FileExistsError:
            raise SandboxFileError(f"checkpoint {folder}: exists already") from None
        try:
            # A second save would find the guest frozen already.
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
        log.debug("checkpoint %s: paused for %.0f ms", folder.name, checkpoint.pause_ms)
        self._kind.keep(checkpoint.token, saved)

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self.monitor.close()
        await super().close()


def _copy_identity(epoch: int) -> GuestIdentity:
    """Return a new identity for a copy, which keeps the host name of its original."""
    # Setting the host name writes a file, which is slow right after a copy under emulation.
    return GuestIdentity.new(epoch, hostname="")


@contextlib.asynccontextmanager
async def _connected(
    kind: MachineKind,
    launched: QemuProcess,
    memory: Memory,
    line: LineState | None,
    timeout_s: float,
) -> AsyncGenerator[QemuMachine]:
    """Connect to a QEMU process; an error or a timeout in the block ends the process."""
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
        kind: Properties of both machines.
        saved: Machine to resume from.
        asked_at: Time of the request by `time.perf_counter`, in seconds, for the record.
        cpu: Host CPU to pin it to.
        timeout_s: Maximum seconds until the guest has answered.

    """
    launched = QemuProcess(kind.command, saved.memory, boots=False, cpu=cpu)
    async with _connected(kind, launched, saved.memory, saved.line, timeout_s) as machine:
        launched.load_devices(saved.devices)
        await machine.become(_copy_identity(saved.line.epoch + 1), timeout_s=timeout_s)
    machine.info = booted(kind.info, asked_at)
    return machine


async def make_template(kind: MachineKind, *, deadline_s: float) -> SavedMachine:
    """Boot a machine, save it, and end it; return the saved state."""
    memory = Memory(kind.command.mem_bytes)
    launched = QemuProcess(kind.command, memory, boots=True, cpu=None)
    async with _connected(kind, launched, memory, None, deadline_s) as machine:
        await machine.connected()
        await machine.become(GuestIdentity.new(0), timeout_s=deadline_s)
    try:
        line = await machine.stand_by(settle_s=SETTLE_S)
        devices = await machine.monitor.save_devices()
    finally:
        await machine.close()
    return SavedMachine(memory, devices, line)
