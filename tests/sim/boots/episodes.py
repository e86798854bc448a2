"""Episodes on leased machines: every operation is asked for three times and must run once."""

import asyncio
import random
from collections import Counter

from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host_context import ActorIdentity, HostContext
from penstock.envs.sandbox import Sandbox, SandboxError, SandboxTimeout
from penstock.envs.sandbox_client.client import ACQUIRE_SERVICE, GroupSpec, LeaseSpec, lease_sandbox
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import DeadlineError, RemoteCallError
from penstock.messages.sandbox import AcquireSandbox, ExecResult

GROUP_SIZE = 2
NUM_GROUPS = 6
"""At once."""
NUM_OPERATIONS = 2
NUM_ASKED = 3
ABANDONED = 0.03
"""Of the episodes; nobody gives their machine back, and its lease must be reaped."""
EPISODE_S_MAX = 150.0
LEASE_S = 8.0
ONCE = ["sh", "-c", "echo run >> runs; wc -l < runs; cat /proc/sys/kernel/random/boot_id"]
"""Says how many operations this machine has run, and which boot of which machine it is."""


class RanTwiceError(AssertionError):
    """An operation ran twice, or in a machine that its lease did not begin with."""


class Episodes:
    """Runs episodes, group by group, and counts how they end."""

    def __init__(self, bus: NatsBus, rng: random.Random, prefix: str) -> None:
        identity = ActorIdentity(name="boots", seed=0, incarnation=prefix)
        self._ctx = HostContext(identity, bus=bus, store=MemoryStore(), clock=SystemClock())
        self._rng = rng
        self._prefix = prefix
        self._num_groups = 0
        self.num_boots = 0
        """Machines that were leased."""
        self.outcomes: Counter[str] = Counter()

    async def run(self, num_boots: int) -> None:
        """Run groups until that many machines were leased."""

        async def lane() -> None:
            while self.num_boots < num_boots:
                await self._group()

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_GROUPS):
                group.create_task(lane())
        await self._ctx.close()

    async def _group(self) -> None:
        self._num_groups += 1
        group_id = f"{self._prefix}.{self._num_groups}"
        if self._rng.random() < ABANDONED * GROUP_SIZE:
            await self._abandon(group_id)
        spec = LeaseSpec(
            holder="boots", lease_s=LEASE_S, acquire_wait_s=60.0, margin_s=6.0,
            group=GroupSpec(group_id=group_id, num_machines=GROUP_SIZE),
        )  # fmt: skip
        async with asyncio.timeout(EPISODE_S_MAX):
            await asyncio.gather(
                *(self._member(f"{group_id}.{member}", spec) for member in range(GROUP_SIZE))
            )

    async def _member(self, lease_id: str, spec: LeaseSpec) -> None:
        try:
            async with lease_sandbox(self._ctx, lease_id, spec) as machine:
                self.num_boots += 1
                await self._use(machine)
        except SandboxError as error:
            self.outcomes[type(error).__name__] += 1
        else:
            self.outcomes["done"] += 1

    async def _use(self, machine: Sandbox) -> None:
        """Run some operations, each asked for several times at once."""
        boots: set[bytes] = set()
        for number in range(1, NUM_OPERATIONS + 1):
            asked = [
                machine.exec(ONCE, timeout_s=5.0, op_key=f"op{number}") for _ in range(NUM_ASKED)
            ]
            results = await asyncio.gather(*asked, return_exceptions=True)
            for result in results:
                if isinstance(result, ExecResult) and result.timed_out:
                    raise SandboxTimeout(f"operation {number}: a busy computer, {result}")
                if isinstance(result, ExecResult):
                    count, boot_id = result.stdout.split()
                    boots.add(boot_id)
                    if int(count) != number or len(boots) != 1:
                        raise RanTwiceError(f"operation {number}: {result.stdout!r}, {boots}")
            failures = [result for result in results if isinstance(result, BaseException)]
            if failures:
                raise failures[0]

    async def _abandon(self, group_id: str) -> None:
        """Take a machine as a worker does that dies at once."""
        wanted = AcquireSandbox(lease_id=f"{group_id}.lost", holder="lost", lease_s=LEASE_S / 2)
        try:
            await self._ctx.request(ACQUIRE_SERVICE, wanted, deadline_s=6.0)
        except (RemoteCallError, DeadlineError) as error:
            self.outcomes[f"abandoned: {type(error).__name__}"] += 1
        else:
            self.num_boots += 1
            self.outcomes["abandoned"] += 1
