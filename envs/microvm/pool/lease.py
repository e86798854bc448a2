"""Leases on machines, and a pool's counters."""

import asyncio
import math
from collections.abc import Callable

import msgspec

from penstock.envs.sandbox import Machine


class PoolCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool has done so far, and what it holds now."""

    booted: int
    boot_failures: int
    deaths: int
    """Machines that ended by themselves, idle or leased."""
    expired: int
    """Leases that ended because nobody renewed them."""
    close_failures: int
    """Machines that survived SIGKILL."""
    live: int
    idle: int
    leased: int
    waiting: int
    boot_ms_p50: float
    boot_ms_p99: float
    restored: int = 0
    """Machines that resumed from a checkpoint."""


class Lease:
    """The right to use one machine until it expires; every use through the pool renews it."""

    def __init__(self, lease_id: str, sandbox: Machine, lease_s: float) -> None:
        self.lease_id = lease_id
        self.sandbox = sandbox
        self.lease_s = lease_s
        self.expires_at = 0.0

    def renew(self, now: float) -> None:
        """Restart the lease's time."""
        self.expires_at = now + self.lease_s


class Leases:
    """The leases that are held now.

    Args:
        monotonic: Clock that they expire by.

    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._leases: dict[str, Lease] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._leases)

    def grant(self, lease_id: str, machine: Machine, lease_s: float) -> Lease:
        """Start a lease."""
        lease = self._leases[lease_id] = Lease(lease_id, machine, lease_s)
        lease.renew(self._monotonic())
        return lease

    def renewed(self, lease_id: str) -> Lease | None:
        """Return a lease and renew it; None where there is none."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.renew(self._monotonic())
        return lease

    def ids(self) -> set[str]:
        """Return the ids of all leases."""
        return set(self._leases)

    def end(self, lease_id: str) -> Machine | None:
        """End a lease; return its machine, None where there is no such lease."""
        lease = self._leases.pop(lease_id, None)
        return lease.sandbox if lease else None

    def end_expired(self) -> list[Machine]:
        """End expired leases; return their machines."""
        now = self._monotonic()
        expired = [lease for lease in self._leases.values() if lease.expires_at <= now]
        for lease in expired:
            del self._leases[lease.lease_id]
        self.num_expired += len(expired)
        return [lease.sandbox for lease in expired]

    def next_expiry(self) -> float:
        """Return when the first of them expires; infinite if there is none."""
        return min((lease.expires_at for lease in self._leases.values()), default=math.inf)


class PendingLease:
    """A lease that was requested and not granted yet; several clients may share one.

    The lease exists from the moment a machine is assigned to it, so that a machine whose clients
    have all gone meanwhile expires like any other.
    """

    def __init__(self, lease_id: str, lease_s: float) -> None:
        self.lease_id = lease_id
        self.lease_s = lease_s
        self.num_clients = 0
        loop = asyncio.get_running_loop()
        self.requested_at = loop.time()
        self.granted: asyncio.Future[Lease] = loop.create_future()

    async def wait(self) -> Lease:
        """Wait for the lease; the last client to leave withdraws the request.

        Raises:
            SandboxError: Booting failed.

        """
        self.num_clients += 1
        try:
            return await asyncio.shield(self.granted)
        finally:
            self.num_clients -= 1
            if self.num_clients == 0:
                self.granted.cancel()
