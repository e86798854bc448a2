"""One QEMU: booted, copied, saved, loaded. `qemu.py` says what is made of this."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from penstock.envs.microvm.checkpoint import STATE, Checkpoint, save_manifest
from penstock.envs.microvm.host_process import HostProcess, start_process
from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.microvm.protocol import GuestConnection, Identity, LineState
from penstock.envs.microvm.qmp import Qmp
from penstock.envs.sandbox import SandboxDied, SandboxFileError, SandboxTimeout
from penstock.messages.rollout import SandboxRecord

SAVE_DEADLINE_S = 60.0
BANDWIDTH = 1 << 40
"""Bytes a second; QEMU would else save as slowly as if a network were to be spared."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10
"""0x10: F_SEAL_FUTURE_WRITE, which lets copies map it privately and nobody change it."""


class Memory:
    """A guest's memory: its own, or over a memfd, shared while the template fills it."""

    def __init__(self, memfd: int = -1, *, shared: bool = False) -> None:
        self.memfd = memfd
        self.shared = shared

    def object_option(self, mem_mib: int) -> str:
        """Return QEMU's `-object`."""
        if self.memfd < 0:
            return f"memory-backend-ram,id=ram,size={mem_mib}M"
        share = "on" if self.shared else "off"
        path = f"/proc/self/fd/{self.memfd}"
        return f"memory-backend-file,id=ram,size={mem_mib}M,mem-path={path},share={share}"


class Builder(Protocol):
    """What is needed of a backend."""

    name: str
    machine_digest: str
    command: Callable[..., list[str]]
    record: Callable[[float], SandboxRecord]


class Template:
    """A stopped machine in two memfds; they go when this process and all copies are gone."""

    def __init__(self, memfd: int, state: int, line: LineState) -> None:
        self.memory = Memory(memfd)
        self.line = line
        self._state = state

    def open_state(self) -> IO[bytes]:
        """Open the devices' state anew: copies must not share a reading position."""
        return Path(f"/proc/self/fd/{self._state}").open("rb")

    def __del__(self) -> None:
        os.close(self.memory.memfd)
        os.close(self._state)


class QemuMachine(GuestSandbox):
    """A `SavingMachine`."""

    def __init__(
        self,
        builder: Builder,
        connection: GuestConnection,
        process: HostProcess,
        monitor: Qmp,
        info: SandboxRecord,
    ) -> None:
        super().__init__(connection, process, info)
        self.monitor = monitor
        self._builder = builder
        self._saving = asyncio.Lock()

    async def connected(self) -> None:
        """Wait for the hello of a guest that boots."""
        await self._connection.ready

    async def become(self, identity: Identity) -> None:
        """Let a frozen guest go on."""
        await self._connection.thaw(identity, timeout_s=self.hang_grace_s)

    async def save(self, state: int, *, ignore_shared: bool = False) -> LineState:
        """Freeze, stop and save all that a copy needs into a descriptor."""
        await self.monitor.set_ignore_shared(ignore_shared)
        await self.monitor.run("migrate-set-parameters", **{"max-bandwidth": BANDWIDTH})
        line = await self._connection.freeze(timeout_s=self.hang_grace_s)
        await self.monitor.run("stop")
        await self.monitor.give_fd("state", state)
        await self.monitor.run("migrate", uri="fd:state")
        await self.monitor.migrated(deadline_s=SAVE_DEADLINE_S)
        return line

    async def _save_and_go_on(self, state: int) -> tuple[LineState, float]:
        """Save, and go on as the machine it was, also when saving failed."""
        async with self._saving:
            started = time.perf_counter()
            try:
                line = await self.save(state)
            finally:
                await self.monitor.run("cont")
                await self.become(Identity(epoch=self._connection.epoch))
            return line, (time.perf_counter() - started) * 1000

    async def checkpoint(self, folder: Path) -> None:
        """See `SavingMachine.checkpoint`. The machine waits for memory alone, not for the disk."""
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, mode=0o700)
        except FileExistsError:
            raise SandboxFileError(f"checkpoint {folder}: exists already") from None
        try:
            with os.fdopen(os.memfd_create("checkpoint", os.MFD_CLOEXEC), "rb") as state:
                line, pause_ms = await self._save_and_go_on(state.fileno())
                await asyncio.to_thread(_write_out, state, folder / STATE)
                num_bytes = os.fstat(state.fileno()).st_size
            checkpoint = Checkpoint(
                backend=self._builder.name,
                machine_digest=self._builder.machine_digest,
                line=line,
                num_bytes=num_bytes,
                pause_ms=pause_ms,
            )
            await asyncio.to_thread(save_manifest, folder, checkpoint)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self.monitor.close()
        await super().close()


def _write_out(state: IO[bytes], path: Path) -> None:
    with path.open("wb") as file:
        os.lseek(state.fileno(), 0, os.SEEK_SET)
        shutil.copyfileobj(state, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _monitor_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise SandboxDied(f"no machine could be started: {error}") from error
    with theirs:
        yield ours, theirs


@contextlib.asynccontextmanager
async def _started(
    builder: Builder, memory: Memory, line: LineState | None, cpu: int | None, timeout_s: float
) -> AsyncIterator[QemuMachine]:
    """Start QEMU and connect; what goes wrong in the block, or takes too long, ends it."""
    fds = [] if memory.memfd < 0 else [memory.memfd]
    with _monitor_ends() as (ours, theirs):
        process, line_end = start_process(
            lambda fd: builder.command(fd, theirs.fileno(), memory, paused=line is not None),
            cpu,
            [theirs.fileno(), *fds],
        )
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: GuestConnection(process.last_words, line), sock=line_end
    )
    monitor = None
    try:
        async with asyncio.timeout(timeout_s):
            monitor = await Qmp.open(ours, deadline_s=timeout_s)
            yield QemuMachine(builder, connection, process, monitor, builder.record(0.0))
    except BaseException as error:
        if monitor is not None:
            monitor.close()
        connection.abort()
        words = process.last_words()
        await process.kill()
        if isinstance(error, TimeoutError):
            raise SandboxTimeout(f"not ready within {timeout_s:g} s; {words}") from error
        if isinstance(error, SandboxDied):
            raise SandboxDied(f"{error}; {words}") from error
        raise


async def boot(
    builder: Builder, memory: Memory, *, cpu: int | None, timeout_s: float
) -> QemuMachine:
    """Boot a machine from its kernel."""
    started = time.perf_counter()
    async with _started(builder, memory, None, cpu, timeout_s) as machine:
        await machine.connected()
    machine.info = builder.record((time.perf_counter() - started) * 1000)
    return machine


async def resume(  # noqa: PLR0913
    builder: Builder,
    memory: Memory,
    state: IO[bytes],
    line: LineState,
    *,
    cpu: int | None,
    timeout_s: float,
) -> QemuMachine:
    """Start a machine that goes on from a state, as a new one."""
    started = time.perf_counter()
    async with _started(builder, memory, line, cpu, timeout_s) as machine:
        await _load(machine.monitor, state, ignore_shared=memory.memfd >= 0, within_s=timeout_s)
        await machine.become(Identity.new(line.epoch + 1))
    machine.info = builder.record((time.perf_counter() - started) * 1000)
    return machine


async def _load(monitor: Qmp, state: IO[bytes], *, ignore_shared: bool, within_s: float) -> None:
    await monitor.set_ignore_shared(ignore_shared)
    await monitor.give_fd("state", state.fileno())
    await monitor.run("migrate-incoming", uri="fd:state")
    await monitor.migrated(deadline_s=within_s)
    await monitor.run("cont")


async def make_template(builder: Builder, *, deadline_s: float) -> Template:
    """Boot a machine, save it, end it."""
    memfd = os.memfd_create("template", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    state = os.memfd_create("template-state", os.MFD_CLOEXEC)
    try:
        machine = await boot(builder, Memory(memfd, shared=True), cpu=None, timeout_s=deadline_s)
        try:
            line = await machine.save(state, ignore_shared=True)
        finally:
            await machine.close()
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(memfd)
        os.close(state)
        raise
    return Template(memfd, state, line)
