"""The sandbox host: leases machines and runs operations on them.

```
 sandbox.acquire (shared by all hosts) ──AcquireSandbox──▶ a lease of the pool, or busy
 sandbox.<host>  (this host only)      ──Exec, Read, Write, List, Release, or Acquire to renew──▶
                                       ──AcquireGroup, RenewGroups, ReleaseGroup: many at once──▶
```
Every request that names a lease renews it; the pool reaps leases that nobody renews. The guest runs
a command once per `op_key`, however often it is requested.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.out_of_memory import OutOfMemoryWatch
from penstock.actors.sandbox_host.checkpoints import Checkpoints
from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.actors.sandbox_host.groups import Groups
from penstock.envs.microvm.host_process import HostProcess
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import (
    NetworkedMachine,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxKilled,
    SandboxRequestError,
    SandboxTimeout,
    VerifierRun,
    networked,
    verifying,
)
from penstock.envs.sandbox_client.client import (
    ACQUIRE_SERVICE,
    SCHEDULER_SERVICE,
    SandboxBusyError,
    to_remote_error,
)
from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.errors import DeadlineError, NotFoundError, QueueFullError
from penstock.messages.requests.scheduler import ReleaseGroup, ReportHost
from penstock.messages.rollout import EgressAttempt
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.sandbox import (
    AcquireGroup,
    AcquireSandbox,
    AllowEgress,
    EgressRead,
    ExecCommand,
    ExecResult,
    FileRead,
    FilesListed,
    GroupLeased,
    GroupsRenewed,
    ListFiles,
    ReadEgress,
    ReadFile,
    ReleaseSandbox,
    RenewGroups,
    SandboxLeased,
    SandboxSaved,
    SaveSandbox,
    WriteFiles,
    packed_name,
    unpacked_name,
)

log = logging.getLogger(__name__)

Operation = ExecCommand | ReadFile | WriteFiles | ListFiles | AllowEgress | ReadEgress
RECORDS_MAX = 1024
"""Egress records of dead machines that a host keeps."""
_PRESSURE = Path("/proc/pressure/cpu")


async def operate(sandbox: Sandbox, message: Operation, *, egress_addresses: bool) -> Message:
    """Run one operation and return its answer.

    Raises:
        SandboxError: The operation of `Sandbox` failed.

    """
    match message:
        case ExecCommand():
            # An overloaded host must not use up the time limits of policies.
            before = _starved_us()
            result = await _execute(sandbox, message)
            starved_ms = min((_starved_us() - before) / 1e3, result.duration_ms)
            return msgspec.structs.replace(result, starved_ms=starved_ms)
        case ReadFile():
            return FileRead(
                data=await sandbox.read_file(unpacked_name(message.path), message.num_bytes_max)
            )
        case WriteFiles():
            files = {unpacked_name(path): data for path, data in message.files.items()}
            if message.is_verifier:
                await verifying(sandbox).write_verifier_files(files)
            else:
                await sandbox.write_files(files, keeps_modes=message.keeps_modes)
            return Ack()
        case ListFiles():
            paths = await sandbox.list_files(message.root)
            return FilesListed(paths=[packed_name(path) for path in paths])
        case AllowEgress():
            machine = cast("NetworkedMachine", networked(sandbox))
            await machine.allow_egress(message.rules, allows_addresses=egress_addresses)
            return Ack()
        case ReadEgress():
            return EgressRead(attempts=await networked(sandbox).egress_attempts())


async def _execute(sandbox: Sandbox, command: ExecCommand) -> ExecResult:
    argv = [unpacked_name(argument) for argument in command.argv]
    if command.peer or command.covers:
        run = VerifierRun(
            argv=argv,
            timeout_s=command.timeout_s,
            output_bytes_max=command.output_bytes_max,
            peer=command.peer,
            covers=command.covers,
        )
        return await verifying(sandbox).verify(run, op_key=command.op_key)
    return await sandbox.exec(
        argv,
        cwd=command.cwd,
        env=command.env,
        timeout_s=command.timeout_s,
        output_bytes_max=command.output_bytes_max,
        op_key=command.op_key,
    )


def _starved_us() -> int:
    """Return how long any program of this host has waited for a CPU, in us; 0 if unknown."""
    try:
        some = _PRESSURE.read_text().partition("\n")[0]
        return int(some.rpartition("total=")[2])
    except (OSError, ValueError):
        return 0


class LostRecords:
    """Egress records of machines that died in use; the proxy keeps them on the host."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, list[EgressAttempt]] = OrderedDict()

    def keep(self, lease_id: str, attempts: Sequence[EgressAttempt]) -> None:
        """Keep the record of a machine."""
        self._records[lease_id] = list(attempts)
        if len(self._records) > RECORDS_MAX:
            self._records.popitem(last=False)

    def find(self, lease_id: str) -> list[EgressAttempt] | None:
        """Return the record of a machine, or None."""
        return self._records.get(lease_id)


SETTLE_S = 0.5
"""Seconds in which other machines of the host may turn out to be dead, too."""
NEIGHBOR_S = 5.0
"""Several deaths within this many seconds are the host's failure."""


class Deaths:
    """Decides whether the guest, the host or somebody outside ended a machine."""

    def __init__(self) -> None:
        self.memory = OutOfMemoryWatch()
        self._last: deque[tuple[str, float]] = deque(maxlen=64)
        """(lease, time of death) of recent deaths."""

    async def is_own(self, lease_id: str, pool: Pool) -> bool:
        """Return whether a machine ended by itself, while the host's other machines live."""
        try:
            machine = pool.lease(lease_id).sandbox
        except NotFoundError:  # The lease has ended in the meantime.
            return False
        now = asyncio.get_running_loop().time
        died_at = now()
        self._last.append((lease_id, died_at))
        # Machines of a failing host die one after another: decide once they had the time to.
        await asyncio.sleep(SETTLE_S)
        # A signal from outside is not the guest's doing, unless its memory use provoked it.
        if getattr(machine, "was_killed", False) and not self.memory.has_risen():
            return False
        has_neighbor = any(
            other != lease_id and abs(at - died_at) <= NEIGHBOR_S for other, at in self._last
        )
        return not has_neighbor and not _others_dead(pool, lease_id)


def _others_dead(pool: Pool, lease_id: str) -> bool:
    for other in pool.lease_ids() - {lease_id}:
        with contextlib.suppress(NotFoundError):
            if not getattr(pool.lease(other).sandbox, "alive", True):
                return True
    return False


class SandboxHost(Actor):
    """Leases the machines of one pool."""

    role = "sandbox_host"
    tick_s = 1.0

    def __init__(self, pool: Pool, host_name: str, config: SandboxHostConfig) -> None:
        # The pool is not entered yet: `start` does so, and `stop` closes it.
        self._pool = pool
        self._groups = Groups(pool)
        self._host = host_name
        self._config = config
        self._lost = LostRecords()
        self._deaths = Deaths()
        self._reserved_slots = min(config.reserved_slots, pool.live_max - 1)
        self._checkpoints: Checkpoints | None = None
        self._newest: dict[str, str] = {}
        """Newest lease of each holder."""

    def services(self) -> Mapping[str, Serve]:
        """Return the shared service and this host's own."""
        return {ACQUIRE_SERVICE: self._answer_acquire, f"sandbox.{self._host}": self._answer}

    async def start(self, ctx: Context) -> Effects:
        """Start warming machines; remove leftovers of an earlier host of this name."""
        if folder := self._config.checkpoints:
            num_max = self._config.checkpoints_max
            self._checkpoints = Checkpoints(self._pool, Path(folder), num_max, ctx)
            await self._checkpoints.clean()
        await self._pool.__aenter__()
        log.info(
            "host %s: up to %d machines, %d reserved for grading, checkpoints in %s",
            *(self._host, self._pool.live_max, self._reserved_slots),
            self._config.checkpoints or "no folder",
        )
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Publish the pool's counters and report to the scheduler."""
        self._deaths.memory.sample()
        for name, value in msgspec.structs.asdict(self._pool.counters()).items():
            ctx.set_gauge(name, value)
        if self._config.reports_to_scheduler:
            await self._report(ctx)
        live = self._pool.lease_ids()
        self._newest = {k: lease_id for k, lease_id in self._newest.items() if lease_id in live}
        return ()

    async def _report(self, ctx: Context) -> None:
        counters = self._pool.counters()
        report = ReportHost(
            host=self._host,
            num_slots=self._pool.live_max,
            num_live=counters.live - counters.idle,
            image_digests=self._pool.ready_images(),
            groups=self._groups.held(),
            reserved_slots=self._reserved_slots,
        )
        # Without a scheduler the host serves clients all the same; the next tick tries again.
        with contextlib.suppress(DeadlineError):
            await ctx.request(SCHEDULER_SERVICE, report, deadline_s=self.tick_s, reason="scheduler")

    def processor_s(self) -> Mapping[str, float]:
        """Return the CPU seconds of machines that have ended."""
        return {"machines": HostProcess.ended_s}

    async def stop(self, ctx: Context) -> Effects:
        """Destroy all machines."""
        log.info("host %s: destroying %d machines", self._host, self._pool.counters().live)
        await self._pool.close()
        return ()

    async def _answer_acquire(self, message: Message) -> AsyncIterator[Message]:
        if not isinstance(message, AcquireSandbox):
            yield _unexpected(message)
            return
        if message.avoid_host == self._host:
            yield to_remote_error(SandboxBusyError(f"{self._host} is to be avoided"))
            return
        try:
            yield await self._acquire(message)
        except SandboxError as error:
            log.info("lease %s: refused: %s", message.lease_id, error)
            yield to_remote_error(error)

    async def _acquire(self, message: AcquireSandbox) -> Message:
        lease_id, lease_s = message.lease_id, self._lease_s(message)
        earlier = self._newest.get(message.holder, lease_id)
        if message.takes_over and earlier != lease_id:
            log.info("lease %s: ended, %s takes over for %s", earlier, lease_id, message.holder)
            await self._pool.release(earlier)
        try:
            if message.checkpoint_id:
                reserved_slots = self._reserved_against(message)
                lease = await self._saved().restore(message, lease_s, reserved_slots)
            else:
                lease = await self._pool.acquire(
                    lease_s,
                    lease_id=lease_id,
                    timeout_s=self._config.acquire_s_max,
                    image=message.image_digest,
                    machine=message.machine,
                    reserved_slots=self._reserved_against(message),
                )
        except (DeadlineError, QueueFullError) as error:
            raise SandboxBusyError(str(error)) from error
        self._groups.join(message)
        self._newest[message.holder] = lease_id
        return self._leased(message.lease_id, lease.sandbox)

    def _lease_s(self, request: AcquireSandbox | AcquireGroup) -> float:
        if not request.lease_s > 0:  # Written so that NaN, which would never expire, is refused.
            raise SandboxRequestError(f"lease_s: expected > 0, got {request.lease_s}")
        return min(request.lease_s, self._config.lease_s_max)

    def _reserved_against(self, request: AcquireSandbox) -> int:
        # Room for grading was already left when the scheduler placed the group.
        return 0 if request.is_grading or request.group_id else self._reserved_slots

    async def _acquire_group(self, request: AcquireGroup) -> GroupLeased:
        lease_s = self._lease_s(request)
        try:
            leases = await self._groups.acquire(request, lease_s, self._config.acquire_s_max)
        except (DeadlineError, QueueFullError) as error:
            raise SandboxBusyError(str(error)) from error
        records = [lease.sandbox.info for lease in leases]
        return GroupLeased(group_id=request.group_id, host=self._host, sandboxes=records)

    async def _answer(self, message: Message) -> AsyncIterator[Message]:
        try:
            yield await self._operate(message)
        except (SandboxDied, SandboxTimeout) as error:
            lease_id = getattr(message, "lease_id", "")
            is_own = await self._deaths.is_own(lease_id, self._pool)
            cause = "by itself" if is_own else "or its host failed"
            log.warning("lease %s: machine ended %s: %s", lease_id, cause, error)
            await self._lose(lease_id)
            yield to_remote_error(SandboxKilled(str(error)) if is_own else error)
        except SandboxError as error:
            yield to_remote_error(error)
        except NotFoundError as error:
            # A worker asks for the attempts of the machine that has just died under it.
            lost = self._lost.find(message.lease_id) if isinstance(message, ReadEgress) else None
            if lost is None:
                yield to_remote_error(SandboxDied(str(error)))
            else:
                yield EgressRead(attempts=lost)

    async def _lose(self, lease_id: str) -> None:
        with contextlib.suppress(SandboxError, NotFoundError):
            machine = networked(self._machine(lease_id))
            self._lost.keep(lease_id, await machine.egress_attempts())
        await self._pool.release(lease_id)

    async def _operate(self, message: Message) -> Message:  # noqa: PLR0911 - a case each
        match message:
            case AcquireSandbox():
                if message.is_placed:
                    return await self._acquire(message)
                return self._leased(message.lease_id, self._machine(message.lease_id))
            case SaveSandbox():
                await self._saved().save(message.lease_id, message.checkpoint_id)
                return SandboxSaved(checkpoint_id=message.checkpoint_id, host=self._host)
            case ReleaseSandbox():
                await self._pool.release(message.lease_id)
                return Ack()
            case AcquireGroup():
                return await self._acquire_group(message)
            case RenewGroups():
                return GroupsRenewed(gone=self._groups.renew(message.group_ids))
            case ReleaseGroup():
                await self._groups.release(message.group_id)
                return Ack()
            case _ if isinstance(message, Operation):
                machine, config = self._machine(message.lease_id), self._config
                return await operate(machine, message, egress_addresses=config.egress_addresses)
            case _:
                return _unexpected(message)

    def _saved(self) -> Checkpoints:
        """Return the host's checkpoints.

        Raises:
            SandboxError: The host has no folder for them.

        """
        if self._checkpoints is None:
            raise SandboxError(f"{self._host}: sandbox_host.checkpoints names no folder")
        return self._checkpoints

    def _machine(self, lease_id: str) -> Sandbox:
        return self._pool.lease(lease_id).sandbox

    def _leased(self, lease_id: str, sandbox: Sandbox) -> SandboxLeased:
        return SandboxLeased(lease_id=lease_id, host=self._host, sandbox=sandbox.info)


def _unexpected(message: Message) -> RemoteError:
    name = type(message).__name__
    return RemoteError(kind=RemoteErrorKind.INVALID, error=f"{name} is not a sandbox request")
