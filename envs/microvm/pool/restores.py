"""Copies of saved machines on their way: each is lent once it is up, whoever still waits for it."""

import asyncio
from pathlib import Path
from typing import cast

from penstock.envs.microvm.pool.image_pool import Stock
from penstock.envs.microvm.pool.lease import Lease, Leases
from penstock.envs.microvm.pool.machines import Machines
from penstock.envs.sandbox import Machine, SavingBackend


class Restores:
    """Starts copies, one a lease id.

    Args:
        machines: Which start them.
        leases: Where they go.
        timeout_s: Deadline of one start.

    """

    def __init__(self, machines: Machines, leases: Leases, timeout_s: float) -> None:
        self._machines = machines
        self._leases = leases
        self._timeout_s = timeout_s
        self._tasks: dict[str, asyncio.Task[Lease]] = {}
        self.num_done = 0

    @property
    def tasks(self) -> list[asyncio.Task[Lease]]:
        """Those on the way."""
        return list(self._tasks.values())

    def find(self, lease_id: str) -> asyncio.Task[Lease] | None:
        """Return the copy on its way for a lease."""
        return self._tasks.get(lease_id)

    def begin(
        self, stock: Stock, folder: Path, lease_id: str, lease_s: float
    ) -> asyncio.Task[Lease]:
        """Start a copy, once the machine has ended whose room it takes, if need be.

        Raises:
            QueueFullError: There is no room, and no idle machine either.

        """
        earlier = self._machines.make_room()
        stock.num_booting += 1
        work = self._restore(stock, folder, lease_id, lease_s, earlier)
        restoring = self._tasks[lease_id] = asyncio.create_task(work)
        return restoring

    async def _restore(
        self, stock: Stock, folder: Path, lease_id: str, lease_s: float, earlier: list[Machine]
    ) -> Lease:
        backend = cast(SavingBackend, stock.backend)

        async def start(cpu: int) -> Machine:
            for machine in earlier:
                await self._machines.end(machine)
            return await backend.restore(folder, cpu=cpu, timeout_s=self._timeout_s)

        try:
            machine = await self._machines.start(stock, start)
        finally:
            self._tasks.pop(lease_id, None)
        self.num_done += 1
        return self._leases.lend(lease_id, machine, lease_s)
