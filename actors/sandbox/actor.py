"""The sandbox host: answers requests for machines."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.sandbox.config import SandboxHostConfig
from penstock.actors.sandbox.leases import LeaseBook, MachinePool
from penstock.envs.remote import ACQUIRE_SERVICE, SandboxBusyError
from penstock.envs.sandbox import (
    ExecResult,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxTimeout,
)
from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.generation import Ack, RemoteError, RemoteErrorKind
from penstock.messages.machine import (
    AcquireSandbox,
    CommandFinished,
    ExecCommand,
    FileRead,
    FilesListed,
    ListFiles,
    ReadFile,
    ReleaseSandbox,
    SandboxLeased,
    WriteFiles,
)

_ON_LEASE = (AcquireSandbox, ExecCommand, ReadFile, WriteFiles, ListFiles)
_KINDS: tuple[tuple[type[SandboxError], RemoteErrorKind], ...] = (
    (SandboxBusyError, RemoteErrorKind.BUSY),
    (SandboxDied, RemoteErrorKind.GONE),
    (SandboxTimeout, RemoteErrorKind.GONE),
    (SandboxFileError, RemoteErrorKind.INVALID),
    (SandboxError, RemoteErrorKind.FAILED),
)


class SandboxHost(Actor):
    """Leases machines of one pool; `sandbox.acquire` is shared, `sandbox.<host>` is its own."""

    role = "sandbox"
    tick_s = 1.0

    def __init__(self, pool: MachinePool, host_name: str, config: SandboxHostConfig) -> None:
        """Take the pool; it is closed when the actor stops."""
        self._pool = pool
        self._host = host_name
        self._config = config
        self._book: LeaseBook | None = None

    def services(self) -> Mapping[str, Serve]:
        """Return both services."""
        return {ACQUIRE_SERVICE: self._answer_acquire, f"sandbox.{self._host}": self._answer}

    async def start(self, ctx: Context) -> Effects:
        """Open the book of leases."""
        self._book = LeaseBook(self._pool, self._config, ctx.monotonic)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Reap leases that ran out, and show the fleet."""
        book = self._leases
        await book.reap()
        boots = sorted(book.counts.boot_ms)
        gauges = {
            "booted": book.counts.num_booted,
            "live": len(book),
            "reaped": book.counts.num_reaped,
            "deaths": book.counts.num_lost,
            "boot_ms_p50": _quantile(boots, 0.5),
            "boot_ms_p99": _quantile(boots, 0.99),
            **self._pool.gauges(),
        }
        for name, value in gauges.items():
            ctx.set_gauge(name, value)
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Destroy all machines."""
        await self._leases.close()
        return ()

    @property
    def _leases(self) -> LeaseBook:
        assert self._book is not None, "a request before start"
        return self._book

    async def _answer_acquire(self, message: Message) -> AsyncIterator[Message]:
        """Lease a machine to whoever asks."""
        if not isinstance(message, AcquireSandbox):
            yield _unexpected(message)
            return
        try:
            sandbox = await self._leases.acquire(message)
        except SandboxError as error:
            yield _remote_error(error)
            return
        yield SandboxLeased(lease_id=message.lease_id, host=self._host, sandbox=sandbox.info)

    async def _answer(self, message: Message) -> AsyncIterator[Message]:
        """Do something in a leased machine."""
        lease_id = getattr(message, "lease_id", "")
        try:
            yield await self._operate(message)
        except (SandboxDied, SandboxTimeout) as error:
            await self._leases.lose(lease_id)
            yield _remote_error(error)
        except SandboxError as error:
            yield _remote_error(error)

    async def _operate(self, message: Message) -> Message:
        if isinstance(message, ReleaseSandbox):
            await self._leases.release(message.lease_id)
            return Ack()
        if not isinstance(message, _ON_LEASE):
            return _unexpected(message)
        lease = self._leases.find(message.lease_id)
        lease.num_running += 1
        try:
            if isinstance(message, ExecCommand):
                return _finished(await lease.exec(message))
            sandbox = await asyncio.shield(lease.machine)
            if isinstance(message, AcquireSandbox):
                return SandboxLeased(lease_id=lease.lease_id, host=self._host, sandbox=sandbox.info)
            return await _touch_files(sandbox, message)
        finally:
            lease.num_running -= 1
            self._leases.touch(lease)


async def _touch_files(sandbox: Sandbox, message: ReadFile | WriteFiles | ListFiles) -> Message:
    match message:
        case ReadFile():
            data = await sandbox.read_file(message.path, message.num_bytes_max)
            return FileRead(data=data)
        case WriteFiles():
            await sandbox.write_files(message.files)
            return Ack()
        case ListFiles():
            return FilesListed(paths=await sandbox.list_files(message.root))


def _finished(result: ExecResult) -> CommandFinished:
    return CommandFinished(
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        truncated=result.truncated,
        timed_out=result.timed_out,
        duration_ms=result.duration_ms,
    )


def _remote_error(error: SandboxError) -> RemoteError:
    kind = next(kind for error_type, kind in _KINDS if isinstance(error, error_type))
    return RemoteError(kind=kind, error=str(error))


def _unexpected(message: Message) -> RemoteError:
    name = type(message).__name__
    return RemoteError(kind=RemoteErrorKind.INVALID, error=f"{name} is no request to a sandbox")


def _quantile(ordered: list[float], fraction: float) -> float:
    return ordered[int(fraction * (len(ordered) - 1))] if ordered else 0.0
