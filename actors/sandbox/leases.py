"""The book of leases: who holds which machine, until when, and what ran in it.

```
 acquire ──▶ booting ──▶ held ──release──▶ closed
                │          ├──── lease_s without a request, nothing running ──▶ reaped
                └─ failed  └──── the machine died ──▶ lost
```
A machine is used by one lease and never again.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from penstock.actors.sandbox.config import SandboxHostConfig
from penstock.envs.remote import SandboxBusyError
from penstock.envs.sandbox import ExecResult, Sandbox, SandboxDied, SandboxError
from penstock.messages.machine import AcquireSandbox, ExecCommand

_BOOTS_KEPT = 1024


class MachinePool(Protocol):
    """Where machines come from."""

    async def acquire(self) -> Sandbox:
        """Return a fresh machine, or raise SandboxBusyError or SandboxError."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Return numbers to show, e.g. `warm`."""
        ...

    async def close(self) -> None:
        """Destroy all machines that are not leased."""
        ...


class Lease:
    """One machine in someone's hands."""

    def __init__(
        self,
        request: AcquireSandbox,
        machine: asyncio.Task[Sandbox],
        lease_s: float,
        num_results_kept: int,
    ) -> None:
        """Start with a machine that boots."""
        self.lease_id = request.lease_id
        self.holder = request.holder
        self.lease_s = lease_s
        self.machine = machine
        self.expires_at = float("inf")
        self.num_running = 0
        self._num_results_kept = num_results_kept
        self._results: OrderedDict[str, asyncio.Task[ExecResult]] = OrderedDict()

    async def exec(self, command: ExecCommand) -> ExecResult:
        """Run a command once for each `op_key`: a repeated request waits for the same run."""
        task = self._results.get(command.op_key)
        if task is None:
            task = asyncio.create_task(self._run(command))
            self._results[command.op_key] = task
            while len(self._results) > self._num_results_kept:
                self._results.popitem(last=False)
        return await asyncio.shield(task)

    async def _run(self, command: ExecCommand) -> ExecResult:
        sandbox = await asyncio.shield(self.machine)
        return await sandbox.exec(
            command.argv,
            cwd=command.cwd,
            env=command.env,
            timeout_s=command.timeout_s,
            output_bytes_max=command.output_bytes_max,
            op_key=command.op_key,
        )


class Counts(msgspec.Struct):
    """What became of machines since the start."""

    num_booted: int = 0
    num_reaped: int = 0
    num_lost: int = 0
    boot_ms: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_BOOTS_KEPT))


class LeaseBook:
    """All leases of a host."""

    def __init__(
        self, pool: MachinePool, config: SandboxHostConfig, monotonic: Callable[[], float]
    ) -> None:
        """Start with no lease."""
        self.counts = Counts()
        self._pool = pool
        self._config = config
        self._monotonic = monotonic
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    async def acquire(self, request: AcquireSandbox) -> Sandbox:
        """Return the lease's machine, booting it at the first request only.

        Raises:
            SandboxBusyError: All leases of this host are taken, or the pool has no room.
            SandboxError: The machine did not boot.

        """
        lease = self._leases.get(request.lease_id) or self._open(request)
        self.touch(lease)
        try:
            return await asyncio.shield(lease.machine)
        except SandboxError:
            self._leases.pop(request.lease_id, None)
            raise

    def find(self, lease_id: str) -> Lease:
        """Return a lease and renew it.

        Raises:
            SandboxDied: There is none: never granted here, released, reaped or lost.

        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise SandboxDied(f"lease {lease_id} is not held: released, reaped or lost")
        self.touch(lease)
        return lease

    def touch(self, lease: Lease) -> None:
        """Renew."""
        lease.expires_at = self._monotonic() + lease.lease_s

    async def release(self, lease_id: str) -> None:
        """Destroy a lease's machine; an unknown lease is fine."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            with contextlib.suppress(SandboxError):
                await (await lease.machine).close()

    async def lose(self, lease_id: str) -> None:
        """Forget a machine that died."""
        if lease_id in self._leases:
            self.counts.num_lost += 1
            await self.release(lease_id)

    async def reap(self) -> None:
        """Destroy the machines of leases that ran out."""
        now = self._monotonic()
        for lease in list(self._leases.values()):
            is_idle = lease.machine.done() and not lease.num_running
            if is_idle and lease.expires_at < now:
                self.counts.num_reaped += 1
                await self.release(lease.lease_id)

    async def close(self) -> None:
        """Destroy everything."""
        for lease_id in list(self._leases):
            await self.release(lease_id)
        await self._pool.close()

    def _open(self, request: AcquireSandbox) -> Lease:
        if len(self._leases) >= self._config.num_leases_max:
            raise SandboxBusyError(f"all {self._config.num_leases_max} leases are taken")
        lease_s = min(request.lease_s, self._config.lease_s_max)
        machine = asyncio.create_task(self._boot())
        lease = Lease(request, machine, lease_s, self._config.num_results_kept)
        self._leases[request.lease_id] = lease
        return lease

    async def _boot(self) -> Sandbox:
        sandbox = await self._pool.acquire()
        self.counts.num_booted += 1
        self.counts.boot_ms.append(sandbox.info.boot_ms)
        return sandbox
