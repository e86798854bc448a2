"""Groups of machines that a host leases, counts and ends together."""

import asyncio
from collections import Counter

import msgspec

from penstock.envs.microvm.pool.lease import Lease
from penstock.envs.microvm.pool.pool import Pool
from penstock.messages.requests.scheduler import HeldGroup
from penstock.messages.sandbox import AcquireGroup, AcquireSandbox


class _Member(msgspec.Struct, frozen=True):
    group_id: str
    holder: str


class Groups:
    """Placed groups and their leases."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._members: dict[str, _Member] = {}
        """Group by lease id."""

    def join(self, message: AcquireSandbox) -> None:
        """Add a machine of a group that was leased by itself."""
        if message.group_id:
            self._members[message.lease_id] = _Member(message.group_id, message.holder)

    async def acquire(self, request: AcquireGroup, lease_s: float, timeout_s: float) -> list[Lease]:
        """Lease all machines of a group, in the order of its lease ids, or none.

        Raises:
            DeadlineError: The pool did not have room for all of them in time.
            QueueFullError: Too many requests are waiting.
            ImageAbsent: The image is not available.
            NeedsRefused: The group needs larger machines than this host has.
            SandboxError: A machine did not boot.

        """
        leases = [
            self._pool.acquire(
                lease_s,
                lease_id=lease_id,
                timeout_s=timeout_s,
                image=request.image_digest,
                machine=request.machine,
            )
            for lease_id in request.lease_ids
        ]
        given = await asyncio.gather(*leases, return_exceptions=True)
        # Without `return_exceptions`, leases granted after the first failure would be lost.
        failures = [lease for lease in given if isinstance(lease, BaseException)]
        if failures:
            await self._release(request.lease_ids)
            raise failures[0]
        member = _Member(request.group_id, request.holder)
        self._members.update(dict.fromkeys(request.lease_ids, member))
        return [lease for lease in given if isinstance(lease, Lease)]

    async def release(self, group_id: str) -> None:
        """End all machines of a group; repeated calls have no effect."""
        await self._release(
            [lease_id for lease_id, m in self._members.items() if m.group_id == group_id]
        )

    def renew(self, group_ids: list[str]) -> list[str]:
        """Renew all leases of some groups; return the groups without leases."""
        missing = set(group_ids)
        live = self._pool.lease_ids()
        for lease_id, member in self._members.items():
            if lease_id in live and member.group_id in group_ids:
                self._pool.lease(lease_id)
                missing.discard(member.group_id)
        return sorted(missing)

    async def _release(self, lease_ids: list[str]) -> None:
        await asyncio.gather(*(self._pool.release(lease_id) for lease_id in lease_ids))
        for lease_id in lease_ids:
            self._members.pop(lease_id, None)

    def held(self) -> list[HeldGroup]:
        """Return the groups that have machines here, or had some since the last call."""
        # With past ones, so that the scheduler can tell a group that has ended from one whose
        # machines are still to come, for which it keeps room.
        live = self._pool.lease_ids()
        seen, self._members = self._members, {k: m for k, m in self._members.items() if k in live}
        counts = Counter(self._members.values())
        return [
            HeldGroup(group_id=member.group_id, holder=member.holder, num_machines=counts[member])
            for member in dict.fromkeys(seen.values())
        ]
