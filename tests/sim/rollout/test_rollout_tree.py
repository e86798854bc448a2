"""Rollouts that share their first turns: one machine, several copies, every token once."""

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
from tests.sim.rollout.saving import SavingBackend

from penstock.actors.pacer.actor import group_commands
from penstock.actors.pacer.config import PacerConfig, TreeConfig
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.rollout_worker.actor import RolloutRunner, Slots
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.envs.tasks.file_states import is_listing
from penstock.messages.base import Stream
from penstock.messages.codec import encode
from penstock.messages.control import MessageRejected
from penstock.messages.episode import EpisodeSaved
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, Trunk, TurnSampled
from penstock.messages.task import StartRollout

GREP = ("grep", {"pattern": "double"})
DELETE = ("delete_file", {"path": "other.py"})
SCRIPTS = {
    "g0-m0": [[GREP], [FIX], [FINISH]],
    "g0-m1": [[], [GREP], [DELETE], [FINISH]],
    "g0-m2": [[], [FIX], [LOOK], [GREP], [FINISH]],
    "g0-m3": [[], [FINISH]],
}
"""Of a branch: turn 0 is its trunk's."""
NUM_SAMPLED = 3 + 3 + 4 + 1


def tree_command(branches: int = 4, trunk_turns: int = 1, **limits: float) -> StartRollout:
    config = PacerConfig(
        group_size=branches, tree=TreeConfig(trunk_turns=trunk_turns, branches=branches)
    )
    [command] = group_commands(config, 0, make_task(**limits), 0)
    return command


def start(world: World, folder, scripts=SCRIPTS, **settings: object) -> None:
    world.backend = SavingBackend()
    world.policy.scripts = lambda session: scripts[session]
    world.host(world.policy)
    world.host_machines(checkpoints=str(folder / "saved"), **settings)


def check_tree(rollouts: list[RolloutFinished]) -> None:
    ends = {rollout.rollout_id: rollout for rollout in rollouts}
    trunk = ends["g0-m0"]
    assert trunk.trunk is None
    assert sorted(rollout.member for rollout in rollouts) == [0, 1, 2, 3]
    for name in ("g0-m1", "g0-m2", "g0-m3"):
        assert ends[name].trunk == Trunk(rollout_id="g0-m0", num_turns=1)
        assert ends[name].turns[0] == trunk.turns[0]
        assert ends[name].end is EpisodeEnd.FINISHED
    assert ends["g0-m0"].files == ends["g0-m2"].files == {"m.py": FIXED.encode()}
    assert (ends["g0-m1"].files, ends["g0-m1"].deleted) == ({}, ["other.py"])
    assert [ends[f"g0-m{n}"].num_calls for n in range(4)] == [3, 4, 5, 2]
    assert all(rollout.num_invalid_calls == 0 for rollout in rollouts)


def test_branches_go_on_from_one_machine_and_share_its_tokens(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.host_worker()
        await world.publish(tree_command())
        check_tree(await world.wait_for(RolloutFinished, 4))
        assert len(world.policy.requests) == NUM_SAMPLED == len(await world.read(TurnSampled))
        assert world.backend.num_saves == 1
        assert len(world.backend.copies) == 3
        told = sorted(
            ["grep" in each[0] for each in m.commands if not is_listing(each)]
            for m in world.backend.machines
        )
        assert told == [[], [True], [True], [True, False]]  # the trunk's grep ran in one machine
        firsts = [r for r in world.policy.requests if r.request_id.startswith("g0-m1.1")]
        assert [request.routes_from for request in firsts] == [0]
        seeds = {r.sampling.seed for r in world.policy.requests if ".1-" in r.request_id}
        assert len(seeds) == 4
        await world.check_ledger()

    simulate(scenario)


def test_own_turns_hold_every_token_once_with_the_trunk_as_context(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.host_worker()
        await world.publish(tree_command())
        ends = await world.wait_for(RolloutFinished, 4)
        stored = await world.read(TurnSampled)
        own = sum(turn.token_ids.shape[0] for end in ends for turn in end.own_turns)
        assert own == sum(event.turn.token_ids.shape[0] for event in stored)
        for end in ends:
            whole = [ids for turn in end.turns for ids in (turn.context_ids, turn.token_ids)]
            trained = [ids for turn in end.own_turns for ids in (turn.context_ids, turn.token_ids)]
            assert b"".join(a.data for a in whole) == b"".join(a.data for a in trained)

    simulate(scenario)


def test_a_trunk_that_ends_early_has_no_branches(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        scripts = {"g0-m0": [[FINISH]], "g0-m1": [[FIX], [FINISH]]}
        start(world, tmp_path, scripts)
        world.host_worker()
        await world.publish(tree_command(branches=2))
        ends = {end.rollout_id: end for end in await world.wait_for(RolloutFinished, 2)}
        assert [end.trunk for end in ends.values()] == [None, None]
        assert (len(ends["g0-m0"].turns), len(ends["g0-m1"].turns)) == (1, 2)
        assert world.backend.num_saves == 0
        await world.check_ledger()

    simulate(scenario)


@pytest.mark.parametrize("after_s", [0.05, 0.9, 1.4, 2.0, 2.6, 3.5])
def test_a_killed_workers_tree_goes_on(simulate, tmp_path, after_s: float) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.policy.token_s = 0.05
        worker = world.host_worker()
        await world.publish(tree_command())
        await world.sleep(after_s)
        await worker.kill()
        before = {(e.rollout_id, e.turn_index): e.turn for e in await world.read(TurnSampled)}
        world.host_worker()
        ends = await world.wait_for(RolloutFinished, 4)
        check_tree(ends)
        for (rollout_id, index), turn in before.items():
            [end] = [end for end in ends if end.rollout_id == rollout_id]
            assert end.turns[index] == turn
        assert len(world.policy.requests) <= NUM_SAMPLED + 4  # each turn in hand, once more
        await world.check_ledger()

    simulate(scenario)


def test_killed_workers_over_and_over(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.policy.token_s = 0.05
        await world.publish(tree_command())
        for round_ in range(5):
            worker = world.host_worker(checkpoint_turns=1)
            await world.sleep(0.8 + 0.17 * round_)
            await worker.kill()
        world.host_worker(checkpoint_turns=1)
        check_tree(await world.wait_for(RolloutFinished, 4))
        await world.check_ledger()

    simulate(scenario)


def test_a_lost_checkpoint_is_made_up_for_by_the_stored_turns(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.policy.token_s = 0.05
        world.backend.is_forgetful = True
        world.host_worker()
        await world.publish(tree_command())
        check_tree(await world.wait_for(RolloutFinished, 4))
        assert len(world.policy.requests) == NUM_SAMPLED
        assert world.backend.copies == []
        await world.check_ledger()

    simulate(scenario)


def test_machines_that_cannot_be_saved_still_give_every_rollout_an_end(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.backend.capabilities = frozenset()
        world.host_worker()
        await world.publish(tree_command())
        check_tree(await world.wait_for(RolloutFinished, 4))
        assert await world.read(EpisodeSaved) == []
        await world.check_ledger()

    simulate(scenario)


@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_a_rejected_tree_is_accounted_for_with_its_tokens(
    simulate, tmp_path, num_turns: int
) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.policy.token_s = 0.05
        worker = world.host_worker()
        command = tree_command()
        await world.publish(command)
        await world.wait_for(TurnSampled, num_turns)
        await worker.kill()
        world.server.logs[Stream.TASKS].remove(1)
        await world.publish(
            MessageRejected(
                source_stream=Stream.TASKS,
                source_sequence=1,
                source_subject="x",
                actor="rollout_worker",
                cause="delivered 20 times",
                data=encode(command),
            )
        )
        world.host_worker()
        ends = await world.wait_for(RolloutFinished, 4)
        assert {end.end for end in ends} == {EpisodeEnd.INFRASTRUCTURE_ERROR}
        assert sorted(end.rollout_id for end in ends) == sorted(SCRIPTS)
        await world.check_ledger()

    simulate(scenario)


def test_a_finished_tree_is_not_run_again(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.host_worker()
        command = tree_command()
        await world.publish(command)
        await world.wait_for(RolloutFinished, 4)
        num_requests = len(world.policy.requests)
        await world.sleep(1000.0)
        await world.publish(command)  # beyond the stream's window
        await world.sleep(60.0)
        assert len(world.policy.requests) == num_requests
        assert len(await world.read(RolloutFinished)) == 4

    simulate(scenario)


@pytest.mark.parametrize("kept", [[0], [1], [0, 2], [1, 2, 3]])
def test_ends_that_a_crash_left_unsaid_are_made_up_for(simulate, tmp_path, kept) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        command = tree_command()
        replicas = ReplicaTable()
        replicas.add(reported(), now=0.0)
        config, ctx = RolloutWorkerConfig(), world.client("killed")
        tree = RolloutRunner(command, world.chat, config, ctx, Slots(4), replicas)
        ends = await tree.run()
        await world.publish(*[ends[member] for member in kept])
        world.host_worker()
        await world.publish(command)
        check_tree(await world.wait_for(RolloutFinished, 4))
        assert len(world.policy.requests) == NUM_SAMPLED
        await world.check_ledger()

    simulate(scenario)


def test_a_plain_command_is_a_tree_of_one(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.host_worker()
        await world.publish(make_command("g0-m0"))
        [end] = await world.wait_for(RolloutFinished, 1)
        assert (end.trunk, end.own_turns) == (None, end.turns)
        assert world.backend.num_saves == 0

    simulate(scenario)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("dies_at", [1, 3, 5])
def test_a_machine_that_dies_takes_no_rollout_with_it(
    simulate, tmp_path, victim: int, dies_at: int
) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.backend.deaths[victim] = dies_at
        world.host_worker(checkpoint_turns=1)
        await world.publish(tree_command())
        check_tree(await world.wait_for(RolloutFinished, 4))
        assert len(world.policy.requests) == NUM_SAMPLED
        await world.check_ledger()

    simulate(scenario)


def test_faults_of_the_bus_change_no_trees_account(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        world.set_faults(
            lose_receipt=0.05, lose_delivery=0.05, duplicate_delivery=0.1, reorder_delivery=0.3,
            lose_ack=0.05, lose_request=0.01, lose_reply=0.01, latency_s_max=0.01,
        )  # fmt: skip
        start(world, tmp_path)
        for _ in range(2):
            world.host_worker(checkpoint_turns=1)
        await world.publish(tree_command())
        check_tree(await world.wait_for(RolloutFinished, 4))
        await world.sleep(200.0)
        assert len(await world.read(RolloutFinished)) == 4
        await world.check_ledger()

    simulate(scenario)


@pytest.mark.parametrize("num_concurrent", [1, 2])
def test_branches_count_against_the_workers_bound(simulate, tmp_path, num_concurrent) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.host_worker(num_concurrent=num_concurrent)
        await world.publish(tree_command())
        most_live = 0
        async with asyncio.timeout(600.0):
            while len(ends := await world.read(RolloutFinished)) < 4:
                await asyncio.sleep(0.001)
                live = sum(machine.alive for machine in world.backend.machines)
                most_live = max(most_live, live)
        check_tree(ends)
        assert most_live == num_concurrent

    simulate(scenario)
