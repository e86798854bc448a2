"""Worker, generator or machine dies in mid-episode: no token is lost, none is counted twice."""

import asyncio

import pytest
from tests.sim.rollout.conftest import (
    FINISH,
    FIX,
    FIXED,
    LOOK,
    World,
    make_command,
    make_task,
    reported,
)
from tests.support.memory_bus.log import Stored

from penstock.actors.rollout_worker.actor import RolloutWorker
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.messages.base import Stream
from penstock.messages.codec import encode
from penstock.messages.control import MessageRejected
from penstock.messages.generation import Generate
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, TurnSampled

OTHER = ("read_file", {"path": "other.py"})
SCRIPT = [[LOOK], [FIX], [LOOK], [FINISH]]


def start(world: World, **settings: object) -> None:
    world.policy.scripts = lambda _session: SCRIPT
    world.host(world.policy)
    world.host_machines()


def check_complete(rollout: RolloutFinished) -> None:
    assert rollout.end is EpisodeEnd.FINISHED
    assert rollout.files == {"m.py": FIXED.encode()}
    assert len(rollout.turns) == len(SCRIPT)
    assert (rollout.num_calls, rollout.num_invalid_calls) == (4, 0)


@pytest.mark.parametrize("num_turns_before", [0, 1, 2, 3])
def test_a_killed_workers_episode_goes_on_from_its_stored_turns(
    simulate, num_turns_before: int
) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.token_s = 0.2
        worker = world.host_worker()
        await world.publish(make_command("g0-m0"))
        await world.wait_for(TurnSampled, num_turns_before)
        await world.sleep(0.3)
        await worker.kill()
        before = await world.read(TurnSampled)
        world.host_worker()
        [rollout] = await world.wait_for(RolloutFinished, 1)
        check_complete(rollout)
        assert rollout.turns[: len(before)] == [event.turn for event in before]
        assert len(world.policy.requests) <= len(SCRIPT) + 1  # only the turn in hand, once more
        await world.check_ledger()

    simulate(scenario)


def test_killed_workers_over_and_over(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.token_s = 0.05
        await world.publish(*[make_command(f"g0-m{n}") for n in range(6)])
        for round_ in range(4):
            worker = world.host_worker(num_concurrent=6)
            await world.sleep(0.5 + 0.37 * round_)
            await worker.kill()
        world.host_worker(num_concurrent=6)
        for rollout in await world.wait_for(RolloutFinished, 6):
            check_complete(rollout)
        await world.check_ledger()

    simulate(scenario)


def test_two_workers_on_one_command_store_each_turn_once(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.token_s = 0.1
        handled = []
        for name in ("one", "two"):
            worker, ctx = RolloutWorker(world.chat, RolloutWorkerConfig()), world.client(name)
            await worker.on_replica_reported(reported(), ctx)
            handled.append(worker.on_start_rollout(make_command("g0-m0"), ctx))
        (first,), (second,) = await asyncio.gather(*handled)
        await world.publish(first, second)
        assert len(world.policy.requests) > len(SCRIPT)  # both sampled
        [rollout] = await world.read(RolloutFinished)
        check_complete(rollout)
        assert first.turns == second.turns
        assert len(await world.read(TurnSampled)) == len(SCRIPT)
        await world.check_ledger()

    simulate(scenario)


@pytest.mark.parametrize("mode", ["error", "silent", "aborted"])
def test_a_turn_that_breaks_off_is_sampled_again(simulate, mode: str) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.break_mode = mode
        world.policy.breaks["g0-m0"] = 2
        world.host_worker()
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        check_complete(rollout)
        first: list[Generate] = world.policy.requests[:3]
        assert len({request.sampling.seed for request in first}) == 1
        assert len({request.request_id for request in first}) == 3
        assert len(world.policy.requests) == len(SCRIPT) + 2
        await world.check_ledger()

    simulate(scenario)


def test_a_refused_request_is_not_asked_again(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.break_mode = "refused"
        world.policy.breaks["g0-m0"] = 10**6
        world.host_worker()
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.INFRASTRUCTURE_ERROR
        assert "the request is no good" in rollout.error
        assert len(world.policy.requests) == 1

    simulate(scenario)


def test_time_without_a_generator_is_not_the_policys(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.breaks["g0-m0"] = 8
        world.host_worker()
        await world.publish(make_command("g0-m0", make_task(wall_s_max=5.0)))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        check_complete(rollout)
        assert rollout.wall_s > 5.0

    simulate(scenario)


def test_stored_turns_stand_whatever_a_tool_says_the_second_time(simulate) -> None:
    """The second machine's observation would overflow the context: the episode went on, though."""

    async def scenario(world: World) -> None:
        world.policy.scripts = lambda _session: [[OTHER], [FIX], [LOOK], [FINISH]]
        world.host(world.policy)
        world.host_machines()
        world.host_worker()
        world.backend.deaths[0] = 5
        world.backend.padding[1] = b"y = 1\n" * 200
        await world.publish(make_command("g0-m0", make_task(num_tokens_max=250)))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert (rollout.end, len(rollout.turns)) == (EpisodeEnd.FINISHED, 4)
        assert rollout.files["m.py"] == FIXED.encode()
        assert len(world.backend.machines) == 2
        last = world.policy.requests[-1]
        stored = b"".join(
            turn.context_ids.data + turn.token_ids.data for turn in rollout.turns[:-1]
        )
        assert last.token_ids.data == stored + rollout.turns[-1].context_ids.data

    simulate(scenario)


def test_no_generator_is_an_infrastructure_error_that_keeps_its_tokens(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.host_worker(generate_wait_s=30.0)
        world.policy.token_s = 0.1
        await world.publish(make_command("g0-m0"))
        await world.wait_for(TurnSampled, 1)
        world.policy.breaks["g0-m0"] = 10**6
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.INFRASTRUCTURE_ERROR
        assert len(rollout.turns) >= 1
        assert "g0-m0" in rollout.error
        await world.check_ledger()

    simulate(scenario)


@pytest.mark.parametrize("dies_at", [1, 2, 3, 4, 5, 6, 7])
def test_a_lost_machine_is_rebuilt_from_the_stored_turns(simulate, dies_at: int) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.backend.deaths[0] = dies_at
        world.host_worker()
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        check_complete(rollout)
        assert len(world.policy.requests) == len(SCRIPT)  # nothing was sampled twice
        assert len(world.backend.machines) == 2
        await world.check_ledger()

    simulate(scenario)


def test_machines_that_are_all_killed_from_outside_mask_the_rollout(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.backend.deaths[-1] = 3
        world.backend.are_killed = True
        world.host_worker(num_machines_max=3)
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.INFRASTRUCTURE_ERROR
        assert "killed by the test" in rollout.error
        assert len(world.backend.machines) == 3
        assert rollout.turns
        await world.check_ledger()

    simulate(scenario)


def test_a_busy_host_is_asked_again(simulate) -> None:
    async def scenario(world: World) -> None:
        world.policy.scripts = lambda _session: SCRIPT
        world.host(world.policy)
        world.host_machines(live_max=1)
        world.host_worker(num_concurrent=4)
        await world.publish(*[make_command(f"g0-m{n}") for n in range(4)])
        for rollout in await world.wait_for(RolloutFinished, 4):
            check_complete(rollout)

    simulate(scenario)


def test_no_machine_at_all_is_an_infrastructure_error(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host(world.policy)
        world.host_worker(acquire_wait_s=5.0)
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.INFRASTRUCTURE_ERROR
        assert "no sandbox host with room within 5 s" in rollout.error

    simulate(scenario)


def test_a_finished_rollout_is_not_run_again(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.host_worker()
        await world.publish(make_command("g0-m0"))
        await world.wait_for(RolloutFinished, 1)
        num_requests = len(world.policy.requests)
        assert len(world.backend.machines) == 1
        await world.sleep(1000.0)
        await world.publish(make_command("g0-m0"))  # beyond the stream's window
        await world.sleep(60.0)
        assert len(world.policy.requests) == num_requests
        assert len(world.backend.machines) == 1
        assert len(await world.read(RolloutFinished)) == 1

    simulate(scenario)


def test_a_machine_is_kept_while_its_generator_is_slow(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.token_s = 2.0
        world.host_worker(lease_s=3.0)
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end in {EpisodeEnd.FINISHED, EpisodeEnd.TIME_LIMIT}
        assert len(world.backend.machines) == 1

    simulate(scenario)


def test_a_rejected_command_is_accounted_for_with_its_tokens(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.token_s = 0.2
        worker = world.host_worker()
        command = make_command("g0-m0")
        await world.publish(command)
        await world.wait_for(TurnSampled, 1)
        await worker.kill()
        world.server.logs[Stream.TASKS].remove(1)
        rejected = MessageRejected(
            source_stream=Stream.TASKS,
            source_sequence=1,
            source_subject="x",
            actor="rollout_worker",
            cause="delivered 20 times",
            data=encode(command),
        )
        await world.publish(rejected)
        world.host_worker()
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.INFRASTRUCTURE_ERROR
        assert "delivered 20 times" in rollout.error
        await world.check_ledger()

    simulate(scenario)


def test_an_episode_whose_stored_turn_is_none_ends_as_an_infrastructure_error(simulate) -> None:
    async def scenario(world: World) -> None:
        start(world)
        taken = Stored(
            sequence=0, subject="ps.test.trajectories.TurnSampled.g0-m0.1", data=b"\xc1",
            is_claim=False, stored_at=0.0, publish_id="another's",
        )  # fmt: skip
        world.server.logs[Stream.TRAJECTORIES].store(taken)
        world.host_worker()
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.INFRASTRUCTURE_ERROR
        assert "its place in the log is taken" in rollout.error
        assert len(rollout.turns) == 1

    simulate(scenario)
