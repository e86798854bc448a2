"""Leases: granted once, renewed, reaped, lost; asked for over the bus."""

import asyncio

import pytest
from tests.sim.rollout.conftest import World

from penstock.envs.sandbox import SandboxDied, SandboxError, SandboxFileError, SandboxTimeout
from penstock.envs.sandbox_client.client import (
    LeaseSpec,
    RemoteSandbox,
    SandboxBusyError,
    lease_sandbox,
)
from penstock.messages.errors import DeadlineError, RemoteCallError
from penstock.messages.rollout import SandboxRecord
from penstock.messages.sandbox import AcquireSandbox, SandboxLeased

SPEC = LeaseSpec(holder="test", lease_s=10.0, acquire_wait_s=5.0)
CHECK = ["python3", "check.py"]


def ask(lease_id: str, lease_s: float = 10.0) -> AcquireSandbox:
    return AcquireSandbox(lease_id=lease_id, holder="test", lease_s=lease_s)


def test_asking_twice_gives_the_same_machine(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        client = world.client()
        asked = [
            client.request("sandbox.acquire", ask(lease_id), deadline_s=5.0)
            for lease_id in ("a", "a", "b")
        ]
        one, two, other = await asyncio.gather(*asked)
        assert one == two
        assert isinstance(other, SandboxLeased)
        assert len(world.backend.machines) == 2

    simulate(scenario)


def test_a_full_host_is_busy_and_a_boot_that_fails_is_said(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(live_max=1, acquire_s_max=1.0)
        async with lease_sandbox(world.client(), "lease-1", SPEC):
            with pytest.raises(SandboxBusyError, match="no machine within 1 s"):
                async with lease_sandbox(world.client(), "lease-2", SPEC):
                    pass
        world.backend.is_broken = True
        with pytest.raises(SandboxError, match="no boot today"):
            async with lease_sandbox(world.client(), "lease-3", SPEC):
                pass

    simulate(scenario)


def test_lease_time_is_bounded_by_the_host(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(lease_s_max=20.0)
        await world.client().request("sandbox.acquire", ask("a", 1e9), deadline_s=5.0)
        await world.sleep(25.0)
        assert not world.backend.machines[0].alive

    simulate(scenario)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
def test_a_lease_that_would_never_run_out_is_refused(simulate, lease_s) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        with pytest.raises(RemoteCallError, match="lease_s: expected > 0"):
            await world.client().request("sandbox.acquire", ask("a", lease_s), deadline_s=5.0)
        assert world.backend.machines == []

    simulate(scenario)


def test_files_and_programs_over_the_bus(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        async with lease_sandbox(world.client(), "lease-1", SPEC) as sandbox:
            await sandbox.write_files({"check.py": b"print(1 + 1)"})
            done = await sandbox.exec(CHECK, timeout_s=5.0)
            assert (done.exit_code, done.stdout) == (0, b"2\n")
            assert await sandbox.list_files("/work") == ["check.py"]
            assert await sandbox.read_file("check.py", 5) == b"print"
            with pytest.raises(SandboxFileError, match="no file absent"):
                await sandbox.read_file("absent", 5)
            assert sandbox.info.backend == "dry_run"
        assert not world.backend.machines[0].alive

    simulate(scenario)


def test_a_command_with_one_key_runs_once(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        async with lease_sandbox(world.client(), "lease-1", SPEC) as sandbox:
            await sandbox.write_files({"check.py": b"print(1)"})
            runs = [sandbox.exec(CHECK, timeout_s=5.0, op_key="k") for _ in range(3)]
            results = await asyncio.gather(*runs)
            assert [result.stdout for result in results] == [b"1\n"] * 3
            assert world.backend.machines[0].commands == [CHECK]
            await sandbox.exec(CHECK, timeout_s=5.0)
            await sandbox.exec(CHECK, timeout_s=5.0)
            assert len(world.backend.machines[0].commands) == 3

    simulate(scenario)


def test_a_dead_machine_is_gone_and_its_lease_with_it(simulate) -> None:
    async def scenario(world: World) -> None:
        world.backend.deaths[0] = 2
        world.host_machines()
        async with lease_sandbox(world.client(), "lease-1", SPEC) as sandbox:
            await sandbox.write_files({"check.py": b""})
            with pytest.raises(SandboxDied, match="killed by the test"):
                await sandbox.exec(CHECK, timeout_s=5.0)
            with pytest.raises(SandboxDied, match="never granted"):
                await sandbox.exec(CHECK, timeout_s=5.0)

    simulate(scenario)


def test_a_silent_holder_is_reaped_and_a_waiting_one_is_not(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        client = world.client()
        await client.request("sandbox.acquire", ask("silent", 5.0), deadline_s=5.0)
        async with lease_sandbox(client, "waiting", SPEC) as sandbox:
            await world.sleep(60.0)
            assert [machine.alive for machine in world.backend.machines] == [False, True]
            await sandbox.write_files({"a": b""})

    simulate(scenario)


def test_no_host_is_busy_and_a_host_that_left_is_a_timeout(simulate) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(SandboxBusyError, match="no sandbox host with room within 5 s"):
            async with lease_sandbox(world.client(), "lease-1", SPEC):
                pass
        host = world.host_machines()
        async with lease_sandbox(world.client(), "lease-2", SPEC) as sandbox:
            await host.stop()
            with pytest.raises(SandboxTimeout, match="does not answer"):
                await sandbox.read_file("x", 1)

    simulate(scenario)


class FaultyAsker:
    """Answers with whatever the test gave."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def request(self, service: str, message: object, **_: object) -> object:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(0)

    def monotonic(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (DeadlineError("late"), SandboxTimeout),
        (SandboxLeased(lease_id="l", host="h", sandbox=SandboxRecord(
            backend="", isolation_class="", kernel_digest="", image_digest="")), SandboxError),
    ],
)  # fmt: skip
async def test_answers_that_do_not_fit_are_typed(answer: object, expected: type) -> None:
    record = SandboxRecord(backend="", isolation_class="", kernel_digest="", image_digest="")
    leased = SandboxLeased(lease_id="l", host="h", sandbox=record)
    sandbox = RemoteSandbox(FaultyAsker(answer), leased, SPEC)  # type: ignore[arg-type]
    with pytest.raises(expected):
        await sandbox.read_file("x", 1)
    await sandbox.close()
