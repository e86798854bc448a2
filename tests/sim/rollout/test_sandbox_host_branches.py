"""Saving a leased machine and going on from it, over the bus."""

import msgspec
import pytest
from tests.sim.rollout.conftest import World
from tests.sim.rollout.machines import FakeBackend

from penstock.envs.sandbox import Capability, SandboxError, SandboxRequestError
from penstock.envs.sandbox_client.client import LeaseSpec, SandboxBusyError, lease_sandbox

SPEC = LeaseSpec(holder="test", lease_s=10.0, acquire_wait_s=5.0)


def branch_of(saved) -> LeaseSpec:
    return LeaseSpec(holder="test", lease_s=10.0, acquire_wait_s=5.0, branch_of=saved)


class SavingBackend(FakeBackend):
    """Its machines are saved as the names of their files."""

    capabilities = frozenset({Capability.COLD_BOOT, Capability.CHECKPOINT, Capability.FORK})

    def __init__(self):
        super().__init__()
        self.num_saves = 0

    async def start(self, *, cpu=None, timeout_s=10.0):
        machine = await super().start(cpu=cpu, timeout_s=timeout_s)

        async def checkpoint(folder):
            self.num_saves += 1
            folder.mkdir(parents=True)
            (folder / "state").write_text("\n".join(machine.files))

        machine.checkpoint = checkpoint
        return machine

    async def restore(self, folder, *, cpu=None, timeout_s=10.0):
        machine = await self.start()
        names = (folder / "state").read_text().split("\n")
        machine.files = dict.fromkeys(names, b"")
        return machine


def test_branches_go_on_from_a_saved_machine(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        world.backend = SavingBackend()
        world.host_machines(checkpoints=str(tmp_path / "saved"))
        async with lease_sandbox(world.client(), "trunk", SPEC) as trunk:
            await trunk.write_files({"before": b""})
            saved = await trunk.save("turn-3")
            assert await trunk.save("turn-3") == saved
            await trunk.write_files({"after": b""})
            names = [f"branch-{n}" for n in range(3)]
            for name in names:
                async with lease_sandbox(world.client(), name, branch_of(saved)) as branch:
                    await branch.write_files({name: b""})
                    assert sorted(await branch.list_files("/work")) == sorted(["before", name])
        assert world.backend.num_saves == 1

    simulate(scenario)


def test_branches_leave_a_machine_for_grading(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        world.backend = SavingBackend()
        world.host_machines(live_max=3, checkpoints=str(tmp_path / "saved"))
        grading = msgspec.structs.replace(SPEC, is_grading=True)
        async with lease_sandbox(world.client(), "trunk", SPEC) as trunk:
            saved = await trunk.save("turn-3")
            async with lease_sandbox(world.client(), "branch-0", branch_of(saved)):
                with pytest.raises(SandboxBusyError):
                    async with lease_sandbox(world.client(), "branch-1", branch_of(saved)):
                        pass
                async with lease_sandbox(world.client(), "grading", grading):
                    assert sum(machine.alive for machine in world.backend.machines) == 3

    simulate(scenario)


def test_what_cannot_be_saved_or_gone_on_from_says_so(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(checkpoints=str(tmp_path / "saved"))
        async with lease_sandbox(world.client(), "plain", SPEC) as plain:
            with pytest.raises(SandboxError, match="has no checkpoint"):
                await plain.save("x")
        world.backend.capabilities = SavingBackend.capabilities
        async with lease_sandbox(world.client(), "named", SPEC) as named:
            with pytest.raises(SandboxRequestError, match="expected"):
                await named.save("../escape")

    simulate(scenario)


def test_only_the_newest_checkpoints_are_kept(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        world.backend = SavingBackend()
        world.host_machines(checkpoints=str(tmp_path / "saved"), checkpoints_max=2)
        async with lease_sandbox(world.client(), "trunk", SPEC) as trunk:
            for number in range(4):
                await trunk.save(f"turn-{number}")
        assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["turn-2", "turn-3"]

    simulate(scenario)
