"""Leases on machines, and what a pool counts."""

import asyncio

import msgspec

from penstock.envs.sandbox import Machine


class PoolCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool has done and holds now."""

    booted: int
    boot_failures: int
    deaths: int
    """Machines that ended by themselves, idle or leased."""
    expired: int
    """Leases that were reaped because nobody renewed them."""
    close_failures: int
    """Machines that the host did not take away after SIGKILL."""
    live: int
    idle: int
    leased: int
    waiting: int
    boot_ms_p50: float
    boot_ms_p99: float
    restored: int = 0
    """Machines that went on from a checkpoint."""


class Lease:
    """The right to use one machine until it expires; every use through the pool renews it."""

    def __init__(self, lease_id: str, sandbox: Machine, lease_s: float) -> None:
        self.lease_id = lease_id
        self.sandbox = sandbox
        self.lease_s = lease_s
        self.expires_at = 0.0

    def renew(self, now: float) -> None:
        """Start the lease's time again."""
        self.expires_at = now + self.lease_s


class Want:
    """A lease that was asked for and not given yet; several askers may share one.

    The lease exists from the moment a machine is handed to it, so that a machine whose askers
    have all gone meanwhile expires like any other.
    """

    def __init__(self, lease_id: str, lease_s: float) -> None:
        self.lease_id = lease_id
        self.lease_s = lease_s
        self.askers = 0
        self.given: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    async def wait(self, timeout_s: float) -> Lease:
        """Wait for the lease; the last asker to leave withdraws the wish.

        Raises:
            TimeoutError: It was not given in time.
            SandboxError: Booting failed.

        """
        self.askers += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self.given)
        finally:
            self.askers -= 1
            if self.askers == 0:
                self.given.cancel()


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of sorted values by nearest rank; 0 of none."""
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0
