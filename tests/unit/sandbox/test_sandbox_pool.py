"""The pool's leases, bounds and failures, over machines that are plain objects."""

import asyncio

import pytest
from tests.support.virtual_clock import run_virtual

from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import Capability, SandboxDied, SandboxError, SandboxTimeout
from penstock.messages.errors import DeadlineError, NotFoundError, QueueFullError
from penstock.messages.rollout import SandboxRecord


class PlainMachine:
    """Lives until closed or until a test says that it died."""

    def __init__(self, boot_ms):
        self.info = SandboxRecord(
            backend="plain", isolation_class="none", kernel_digest="", image_digest="",
            boot_ms=boot_ms,
        )  # fmt: skip
        self.alive = True
        self.closed = False

    async def close(self):
        self.alive = False
        self.closed = True


class PlainBackend:
    """Boots at once; `failures` boots fail first."""

    name = "plain"
    isolation_class = "none"
    capabilities = frozenset()
    machine_type = PlainMachine

    def __init__(self, failures=0):
        self.machines = []
        self.failures = failures
        self.cpus = []

    async def start(self, *, cpu=None, timeout_s=10.0):
        await asyncio.sleep(0)
        self.cpus.append(cpu)
        if self.failures:
            self.failures -= 1
            raise SandboxDied("no memory on this host")
        machine = self.machine_type(float(len(self.machines) + 1))
        self.machines.append(machine)
        return machine

    def open_machines(self):
        return [m for m in self.machines if not m.closed]


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_machines_are_warmed_and_replaced():
    backend = PlainBackend()
    async with Pool(backend, size=3, live_max=8) as pool:
        await until(lambda: pool.counters().idle == 3)
        lease = await pool.acquire(60.0)
        await until(lambda: pool.counters().idle == 3)
        assert lease.sandbox in backend.open_machines()
        await pool.release(lease.lease_id)
        assert lease.sandbox.closed
        assert pool.counters().booted == 4
        assert pool.counters().boot_ms_p50 == 3.0
        assert pool.counters().boot_ms_p99 == 4.0
    assert backend.open_machines() == []


async def test_a_machine_is_never_lent_twice():
    backend = PlainBackend()
    async with Pool(backend, size=1, live_max=4) as pool:
        seen = []
        for _ in range(10):
            lease = await pool.acquire(60.0)
            seen.append(lease.sandbox)
            await pool.release(lease.lease_id)
        assert len(set(seen)) == 10


async def test_live_max_holds_and_who_waits_is_served_in_order():
    backend = PlainBackend()
    async with Pool(backend, size=0, live_max=2) as pool:
        first, _second = [await pool.acquire(60.0) for _ in range(2)]
        waiting = [asyncio.create_task(pool.acquire(60.0, lease_id=f"w{i}")) for i in range(2)]
        await until(lambda: pool.counters().waiting == 2)
        assert pool.counters().live == 2
        await pool.release(first.lease_id)
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        assert done == {waiting[0]}
        assert len(backend.open_machines()) == 2
        await pool.release("w0")
        await waiting[1]


async def test_waiting_has_a_deadline_that_leaves_nothing_behind():
    backend = PlainBackend()
    async with Pool(backend, size=0, live_max=1) as pool:
        held = await pool.acquire(60.0)
        with pytest.raises(DeadlineError, match="1 leased of at most 1"):
            await pool.acquire(60.0, lease_id="late", timeout_s=0.01)
        await pool.release(held.lease_id)
        await asyncio.sleep(0.01)
        assert pool.counters().leased == 0
        assert pool.counters().waiting == 0
        assert len(backend.machines) == 1


async def test_one_lease_id_gives_one_machine():
    backend = PlainBackend()
    async with Pool(backend, size=0, live_max=4) as pool:
        asked = [pool.acquire(60.0, lease_id="same") for _ in range(3)]
        leases = await asyncio.gather(*asked)
        again = await pool.acquire(60.0, lease_id="same")
        assert {lease.sandbox for lease in [*leases, again]} == set(backend.machines)
        assert len(backend.machines) == 1


def test_a_lease_that_nobody_renews_is_reaped():
    async def scenario():
        backend, now = PlainBackend(), asyncio.get_running_loop().time
        async with Pool(backend, size=0, live_max=4, monotonic=now) as pool:
            kept = await pool.acquire(0.2)
            lost = await pool.acquire(0.2)
            for _ in range(10):
                pool.lease(kept.lease_id)
                await asyncio.sleep(0.04)
            assert lost.sandbox.closed
            assert not kept.sandbox.closed
            assert pool.counters().expired == 1
            with pytest.raises(NotFoundError, match="expired"):
                pool.lease(lost.lease_id)

    run_virtual(scenario())


async def test_a_lease_whose_asker_left_is_not_leaked():
    backend = PlainBackend()
    async with Pool(backend, size=0, live_max=1) as pool:
        held = await pool.acquire(60.0)
        gone = asyncio.create_task(pool.acquire(0.05))
        await until(lambda: pool.counters().waiting == 1)
        gone.cancel()
        await asyncio.wait([gone])
        await pool.release(held.lease_id)
        await until(lambda: not backend.open_machines())
        assert pool.counters().leased == 0


async def test_idle_machines_that_died_are_replaced():
    backend = PlainBackend()
    async with Pool(backend, size=2, live_max=4) as pool:
        await until(lambda: pool.counters().idle == 2)
        for machine in backend.machines:
            machine.alive = False
        lease = await pool.acquire(60.0)
        assert lease.sandbox.alive
        await until(lambda: pool.counters().deaths == 2)


async def test_a_failed_boot_reaches_who_waits_and_the_pool_goes_on():
    backend = PlainBackend(failures=1)
    async with Pool(backend, size=0, live_max=4) as pool:
        with pytest.raises(SandboxDied, match="no memory"):
            await pool.acquire(60.0)
        lease = await pool.acquire(60.0)
        assert lease.sandbox.alive
        assert pool.counters().boot_failures == 1


async def test_machines_are_spread_over_the_cpus(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5})
    backend = PlainBackend()
    async with Pool(backend, size=4, live_max=4) as pool:
        await until(lambda: pool.counters().idle == 4)
    assert sorted(backend.cpus) == [3, 3, 5, 5]


async def test_closing_fails_who_waits():
    pool = Pool(PlainBackend(), size=0, live_max=1)
    async with pool:
        await pool.acquire(60.0)
        waiting = asyncio.create_task(pool.acquire(60.0))
        await until(lambda: pool.counters().waiting == 1)
    with pytest.raises(RuntimeError, match="closed"):
        await waiting


class StuckMachine(PlainMachine):
    """Its end takes for ever, as on a host whose kernel is stuck."""

    async def close(self):
        await asyncio.Event().wait()


async def test_closing_gives_up_at_its_deadline():
    backend = PlainBackend()
    backend.machine_type = StuckMachine
    pool = Pool(backend, size=1, live_max=1)
    await pool.__aenter__()
    await until(lambda: pool.counters().idle == 1)
    with pytest.raises(
        SandboxTimeout, match=r"1 machines are still starting or ending after 0\.01 s"
    ):
        await pool.close(deadline_s=0.01)


class StuckBackend(PlainBackend):
    """No copy ever comes up."""

    capabilities = frozenset({Capability.CHECKPOINT})

    async def restore(self, folder, *, cpu=None, timeout_s=10.0):
        await asyncio.Event().wait()


async def test_closing_fails_who_waits_for_a_copy(tmp_path):
    async with Pool(StuckBackend(), size=0, live_max=1) as pool:
        restoring = asyncio.create_task(pool.restore(tmp_path, 60.0, lease_id="copy"))
        await until(lambda: pool.counters().live == 1)
    with pytest.raises(SandboxError, match="closed"):
        await restoring


class SavingBackend(PlainBackend):
    """Copies come up as machines do."""

    capabilities = frozenset({Capability.CHECKPOINT})

    async def restore(self, folder, *, cpu=None, timeout_s=10.0):
        assert sum(machine.alive for machine in self.machines) < 2
        return await self.start()


async def test_idle_machines_make_room_for_copies(tmp_path):
    backend = SavingBackend()
    async with Pool(backend, size=2, live_max=2) as pool:
        await until(lambda: pool.counters().idle == 2)
        copies = [pool.restore(tmp_path, 60.0, lease_id=lease_id) for lease_id in "ab"]
        assert {lease.lease_id for lease in await asyncio.gather(*copies)} == {"a", "b"}
        with pytest.raises(QueueFullError):
            await pool.restore(tmp_path, 60.0, lease_id="c")


def test_senseless_sizes_are_refused():
    with pytest.raises(ValueError, match="size"):
        Pool(PlainBackend(), size=3, live_max=2)
