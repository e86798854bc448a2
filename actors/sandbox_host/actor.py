"""The sandbox host: answers requests for machines and to machines.

```
 sandbox.acquire (shared by all hosts) ──AcquireSandbox──▶ a lease of the pool, or busy
 sandbox.<host>  (this host's own)     ──Exec, Read, Write, List, Release, or Acquire to renew──▶
                                       ──AcquireGroup, RenewGroups, ReleaseGroup: many at once──▶
```
Every request that names a lease renews it; the pool reaps what nobody renews. The guest runs a
command once for each `op_key`, however often it is requested.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.sandbox_host.checkpoints import Checkpoints
from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.actors.sandbox_host.deaths import Deaths
from penstock.actors.sandbox_host.groups import Groups
from penstock.actors.sandbox_host.operations import LostRecords, Operation, operate
from penstock.envs.microvm.host_process import HostProcess
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import (
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxKilled,
    SandboxRequestError,
    SandboxTimeout,
    networked,
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
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.sandbox import (
    AcquireGroup,
    AcquireSandbox,
    EgressRead,
    GroupLeased,
    GroupsRenewed,
    ReadEgress,
    ReleaseSandbox,
    RenewGroups,
    SandboxLeased,
    SandboxSaved,
    SaveSandbox,
)


class SandboxHost(Actor):
    """Leases the machines of one pool."""

    role = "sandbox"
    tick_s = 1.0

    def __init__(self, pool: Pool, host_name: str, config: SandboxHostConfig) -> None:
        """Take a pool that is not entered yet: it lives as long as the actor."""
        self._pool = pool
        self._groups = Groups(pool)
        self._host = host_name
        self._config = config
        self._lost = LostRecords()
        self._deaths = Deaths()
        self._reserved_slots = min(config.reserved_slots, pool.live_max - 1)
        self._checkpoints: Checkpoints | None = None
        self._newest: dict[str, str] = {}
        """Holder -> the lease that it requested last."""

    def services(self) -> Mapping[str, Serve]:
        """Return both services."""
        return {ACQUIRE_SERVICE: self._answer_acquire, f"sandbox.{self._host}": self._answer}

    async def start(self, ctx: Context) -> Effects:
        """Start warming machines; remove what a host of this name left behind."""
        if folder := self._config.checkpoints:
            num_max = self._config.checkpoints_max
            self._checkpoints = Checkpoints(self._pool, Path(folder), num_max, ctx)
            await self._checkpoints.clean()
        await self._pool.__aenter__()
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Show the pool's counters and report to the scheduler."""
        self._deaths.memory.sample()
        for name, value in msgspec.structs.asdict(self._pool.counters()).items():
            ctx.set_gauge(name, value)
        if self._config.reports_to_scheduler:
            await self._report(ctx)
        live = self._pool.lease_ids()
        self._newest = {k: lease_id for k, lease_id in self._newest.items() if lease_id in live}
        return ()

    async def _report(self, ctx: Context) -> None:
        """Report to the scheduler; without one the host serves every client."""
        counters = self._pool.counters()
        report = ReportHost(
            host=self._host,
            num_slots=self._pool.live_max,
            num_live=counters.live - counters.idle,
            image_digests=self._pool.ready_images(),
            groups=self._groups.held(),
            reserved_slots=self._reserved_slots,
        )
        with contextlib.suppress(DeadlineError):
            await ctx.request(SCHEDULER_SERVICE, report, deadline_s=self.tick_s, reason="scheduler")

    def processor_s(self) -> Mapping[str, float]:
        """Return what the machines used that were ended."""
        return {"machines": HostProcess.ended_s}

    async def stop(self, ctx: Context) -> Effects:
        """Destroy all machines."""
        await self._pool.close()
        return ()

    async def _answer_acquire(self, message: Message) -> AsyncIterator[Message]:
        """Lease a machine; a repeated request with one lease id gets the same one."""
        if not isinstance(message, AcquireSandbox):
            yield _unexpected(message)
            return
        if message.avoid_host == self._host:
            yield to_remote_error(SandboxBusyError(f"{self._host} is to be avoided"))
            return
        try:
            yield await self._acquire(message)
        except SandboxError as error:
            yield to_remote_error(error)

    async def _acquire(self, message: AcquireSandbox) -> Message:
        lease_id, lease_s = message.lease_id, self._lease_s(message)
        earlier = self._newest.get(message.holder, lease_id)
        if message.takes_over and earlier != lease_id:
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
        """Return how long a lease is; NaN or a negative number would never expire."""
        if not request.lease_s > 0:
            raise SandboxRequestError(f"lease_s: expected > 0, got {request.lease_s}")
        return min(request.lease_s, self._config.lease_s_max)

    def _reserved_against(self, request: AcquireSandbox) -> int:
        """Return how many machines it must leave for grading; groups were placed with that room."""
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
        """Serve this host's own service; a machine that died loses its lease."""
        try:
            yield await self._operate(message)
        except (SandboxDied, SandboxTimeout) as error:
            is_own = await self._deaths.is_own(getattr(message, "lease_id", ""), self._pool)
            await self._lose(getattr(message, "lease_id", ""))
            yield to_remote_error(SandboxKilled(str(error)) if is_own else error)
        except SandboxError as error:
            yield to_remote_error(error)
        except NotFoundError as error:
            lost = self._lost.find(message.lease_id) if isinstance(message, ReadEgress) else None
            if lost is None:
                yield to_remote_error(SandboxDied(str(error)))
            else:
                yield EgressRead(attempts=lost)

    async def _lose(self, lease_id: str) -> None:
        """End a machine that died; its egress record can still be read."""
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
            raise SandboxError(f"{self._host}: sandbox.checkpoints names no folder")
        return self._checkpoints

    def _machine(self, lease_id: str) -> Sandbox:
        return self._pool.lease(lease_id).sandbox

    def _leased(self, lease_id: str, sandbox: Sandbox) -> SandboxLeased:
        return SandboxLeased(lease_id=lease_id, host=self._host, sandbox=sandbox.info)


def _unexpected(message: Message) -> RemoteError:
    name = type(message).__name__
    return RemoteError(kind=RemoteErrorKind.INVALID, error=f"{name} is no request to a sandbox")
