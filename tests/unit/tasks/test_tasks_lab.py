"""Gates in machines of a pool: as long as the hidden tests may take."""

import asyncio

from penstock.envs.factory.lab import LEASE_S, MachineLab
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import SandboxDied
from penstock.envs.tasks.changes import Changes
from penstock.messages.rollout import SandboxRecord
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import HiddenTests, Split, Task


class SlowMachine:
    """Runs hidden tests that take nearly all the time that they may."""

    info = SandboxRecord(backend="slow", isolation_class="none", kernel_digest="", image_digest="")

    def __init__(self, backend):
        self.alive = True
        self._backend = backend

    async def write_files(self, files, *, keeps_modes=True):
        pass

    async def exec(self, argv, *, timeout_s, **options):
        self._backend.now_s += timeout_s - 1.0
        await self._backend.pool.acquire(60.0)  # The pool looks for late leases meanwhile.
        await asyncio.sleep(0)
        if not self.alive:
            raise SandboxDied("reaped")
        return ExecResult(exit_code=0, stdout=b"1\n")

    async def close(self):
        self.alive = False


class SlowTests:
    """Starts them, on a clock of its own."""

    name = "slow"
    isolation_class = "none"
    capabilities = frozenset()

    def __init__(self):
        self.now_s = 0.0
        self.pool = Pool(self, size=0, live_max=2, monotonic=lambda: self.now_s)

    async def start(self, *, cpu=None, timeout_s=10.0):
        return SlowMachine(self)


async def test_a_machine_is_kept_for_as_long_as_tests_may_take():
    task = Task(task_id="t", category="r", split=Split.TRAIN, instruction="", files={})
    hidden = HiddenTests(
        task_id="t", files={}, argv=["true"], expected=["1"], timeout_s=3 * LEASE_S
    )
    async with SlowTests().pool as pool:
        assert (await MachineLab(pool).grade(task, hidden, Changes())).is_solved
