"""Leases on machines, granted and pending, and the counters of a pool."""

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec

from penstock.envs.sandbox import Machine

log = logging.getLogger(__name__)


class PoolCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a pool since its start, and its current state."""

    booted: int
    boot_failures: int
    deaths: int
    """Number of machines that died, idle or leased."""
    expired: int
    """Number of leases that ended because nobody renewed them."""
    close_failures: int
    """Number of machines that could not be ended in time."""
    live: int
    idle: int
    leased: int
    waiting: int
    boot_ms_p50: float
    boot_ms_p99: float
    restored: int = 0
    """Number of machines that resumed from a checkpoint."""


class Lease:
    """Right to use one machine until it expires; every use through the pool renews it."""

    def __init__(self, lease_id: str, sandbox: Machine, lease_s: float) -> None:
        self.lease_id = lease_id
        self.sandbox = sandbox
        self.lease_s = lease_s
        self.expires_at = 0.0

    def renew(self, now: float) -> None:
        """Extend the lease to its full duration from now."""
        self.expires_at = now + self.lease_s


class Leases:
    """Leases that are held now.

    Args:
        monotonic: Clock by which leases expire, in seconds.

    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._leases: dict[str, Lease] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._leases)

    def grant(self, lease_id: str, machine: Machine, lease_s: float) -> Lease:
        """Start a lease on a machine."""
        lease = self._leases[lease_id] = Lease(lease_id, machine, lease_s)
        lease.renew(self._monotonic())
        return lease

    def renewed(self, lease_id: str) -> Lease | None:
        """Renew and return a lease; return None if there is no such lease."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.renew(self._monotonic())
        return lease

    def ids(self) -> set[str]:
        """Return the ids of all leases."""
        return set(self._leases)

    def end(self, lease_id: str) -> Machine | None:
        """End a lease and return its machine; return None if there is no such lease."""
        lease = self._leases.pop(lease_id, None)
        return lease.sandbox if lease else None

    def end_expired(self) -> list[Machine]:
        """End expired leases and return their machines."""
        now = self._monotonic()
        expired = [lease for lease in self._leases.values() if lease.expires_at <= now]
        for lease in expired:
            del self._leases[lease.lease_id]
            log.warning("lease %s expired: not renewed in %g s", lease.lease_id, lease.lease_s)
        self.num_expired += len(expired)
        return [lease.sandbox for lease in expired]

    def next_expiry(self) -> float:
        """Return the time at which the first lease expires; infinite if there is none."""
        return min((lease.expires_at for lease in self._leases.values()), default=math.inf)


class PendingLease:
    """Lease that was requested and not granted yet; several clients may wait for one.

    The lease starts when a machine is assigned to it, not when a client picks it up, so that a
    machine whose clients have all gone expires like any other.
    """

    def __init__(self, lease_id: str, lease_s: float) -> None:
        self.lease_id = lease_id
        self.lease_s = lease_s
        self.num_clients = 0
        loop = asyncio.get_running_loop()
        self.requested_at = loop.time()
        self.granted: asyncio.Future[Lease] = loop.create_future()

    async def wait(self) -> Lease:
        """Return the lease once it is granted; the last client to give up cancels it.

        Raises:
            SandboxError: Booting the machine failed.

        """
        self.num_clients += 1
        try:
            # Shielded: other clients may still wait when this one is cancelled.
            return await asyncio.shield(self.granted)
        finally:
            self.num_clients -= 1
            if self.num_clients == 0:
                self.granted.cancel()
