"""An episode goes on from its last saved machine: nothing before it runs again, nothing is lost."""

import shutil

import pytest
from tests.sim.rollout.conftest import FINISH, FIX, FIXED, LOOK, Hosted, World, make_command
from tests.sim.rollout.saving import SavingBackend

from penstock.messages.base import Array
from penstock.messages.episode import EpisodeSaved
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, TurnSampled

DELETE = ("delete_file", {"path": "other.py"})
SCRIPT = [[LOOK], [FIX], [DELETE], [LOOK], [FINISH]]


def start(world: World, folder) -> Hosted:
    world.backend = SavingBackend()
    world.policy.scripts = lambda _session: SCRIPT
    world.policy.token_s = 0.05
    world.host(world.policy)
    return world.host_machines(checkpoints=str(folder / "saved"))


def check_complete(world: World, rollout: RolloutFinished) -> None:
    assert rollout.end is EpisodeEnd.FINISHED
    assert (rollout.files, rollout.deleted) == ({"m.py": FIXED.encode()}, ["other.py"])
    assert len(rollout.turns) == len(SCRIPT)
    assert (rollout.num_calls, rollout.num_invalid_calls) == (5, 0)
    assert [len(times) for times in rollout.call_s] == [len(names) for names in rollout.tool_names]


async def killed_after(world: World, num_turns: int, **settings: object) -> None:
    """Kill a worker while it samples the turn after `num_turns` stored ones."""
    worker = world.host_worker(**settings)
    await world.publish(make_command("g0-m0"))
    await world.wait_for(TurnSampled, num_turns)
    await world.sleep(0.1)
    await worker.kill()


@pytest.mark.parametrize("num_turns", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 2])
def test_another_worker_goes_on_from_the_newest_saved_state(
    simulate, tmp_path, num_turns: int, every: int
) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        await killed_after(world, num_turns, checkpoint_turns=every)
        before = await world.read(TurnSampled)
        saved = [event.num_turns for event in await world.read(EpisodeSaved)]
        assert saved == [n for n in range(1, len(before) + 1) if n % every == 0]
        num_booted = len(world.backend.machines)
        world.host_worker(checkpoint_turns=every)
        [rollout] = await world.wait_for(RolloutFinished, 1)
        check_complete(world, rollout)
        assert rollout.turns[: len(before)] == [event.turn for event in before]
        assert len(world.policy.requests) <= len(SCRIPT) + 1
        if saved:
            [second] = world.backend.copies
            assert len(world.backend.machines) == num_booted + 1
            assert second.files["m.py"] == FIXED
        if every == 1:
            deletions = [c for m in world.backend.machines for c in m.commands if c[0] == "rm"]
            assert len(deletions) == 1
        await world.check_ledger()

    simulate(scenario)


def test_a_dead_machine_is_followed_by_a_copy_of_its_last_state(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.backend.deaths[0] = 6
        world.host_worker(checkpoint_turns=1)
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        check_complete(world, rollout)
        assert len(world.policy.requests) == len(SCRIPT)
        assert len(world.backend.copies) == 1
        await world.check_ledger()

    simulate(scenario)


@pytest.mark.parametrize("damage", ["gone", "unreadable", "host"])
def test_without_its_checkpoint_the_stored_turns_are_run_again(
    simulate, tmp_path, damage: str
) -> None:
    async def scenario(world: World) -> None:
        machines = start(world, tmp_path)
        await killed_after(world, 3, checkpoint_turns=1)
        if damage == "host":
            await machines.kill()
            world.host_machines(name="host-1")
        for folder in (tmp_path / "saved").iterdir():
            if damage == "unreadable":
                (folder / "state").write_bytes(b"\\x00")
            else:
                shutil.rmtree(folder)
        world.host_worker(restore_wait_s=15.0)
        [rollout] = await world.wait_for(RolloutFinished, 1)
        check_complete(world, rollout)
        assert world.backend.copies == []
        assert len(world.policy.requests) <= len(SCRIPT) + 1
        await world.check_ledger()

    simulate(scenario)


def test_time_in_a_lost_machine_counts_up_to_its_saved_state(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        await killed_after(world, 3, checkpoint_turns=3)
        [saved] = await world.read(EpisodeSaved)
        await world.sleep(500.0)
        world.host_worker()
        [rollout] = await world.wait_for(RolloutFinished, 1)
        check_complete(world, rollout)
        assert saved.elapsed_s < rollout.wall_s < saved.elapsed_s + 20.0

    simulate(scenario)


def test_a_host_that_starts_again_removes_what_no_event_names(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        left = tmp_path / "saved" / "r0-2-worker-i1-9"
        left.mkdir(parents=True)
        named = EpisodeSaved(
            rollout_id="r0-a", group_id="g0", num_turns=2, checkpoint_id="r0-a-2-worker-i1-3",
            host="host-0", observation_ids=Array(dtype="int32", shape=(0,), data=b""),
            num_calls=0, num_invalid_calls=0, tool_s=0.0, elapsed_s=0.0,
        )  # fmt: skip
        (tmp_path / "saved" / named.checkpoint_id).mkdir()
        await world.publish(named)
        world.host_machines(checkpoints=str(tmp_path / "saved"))
        await world.sleep(1.0)
        kept = [path.name for path in (tmp_path / "saved").iterdir()]
        assert kept == [named.checkpoint_id]

    simulate(scenario)
