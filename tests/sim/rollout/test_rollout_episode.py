"""Episodes from prompt to trajectory, and the limits that end them."""

import itertools
import struct

from tests.sim.rollout.conftest import FINISH, FIX, FIXED, LOOK, World, make_command, make_task

from penstock.actors.sandbox_host import actor
from penstock.kernels.route_segments import open_routes
from penstock.messages.base import Array
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, TurnSampled

GREP = ("grep", {"pattern": "double"})


def int32_list(array: Array) -> list[int]:
    return list(struct.unpack(f"<{array.shape[0]}i", array.data))


async def run_one(world: World, script: list, **limits: float) -> RolloutFinished:
    world.policy.scripts = lambda _session: script
    for policy in (world.policy,):
        world.host(policy)
    world.host_machines()
    world.host_worker()
    await world.publish(make_command("g0-m0", make_task(**limits)))
    [rollout] = await world.wait_for(RolloutFinished, 1)
    await world.check_ledger()
    return rollout


def test_an_episode_looks_edits_and_finishes(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[LOOK], [FIX], [FINISH]])
        assert rollout.end is EpisodeEnd.FINISHED
        assert rollout.files == {"m.py": FIXED.encode()}
        assert rollout.deleted == []
        assert (rollout.num_calls, rollout.num_invalid_calls) == (3, 0)
        assert rollout.sandbox is not None
        assert [turn.calls[0].name for turn in rollout.turns] == [
            "read_file", "edit_file", "finish",
        ]  # fmt: skip
        assert len(await world.read(TurnSampled)) == 3
        assert all(not machine.alive for machine in world.backend.machines)

    simulate(scenario)


def test_context_is_the_concatenation_of_what_was_sampled_and_observed(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[LOOK], [FINISH]])
        first, second = world.policy.requests
        prompt, sampled = (int32_list(a) for a in (first.token_ids, rollout.turns[0].token_ids))
        observation = int32_list(rollout.turns[1].context_ids)
        assert int32_list(second.token_ids) == prompt + sampled + observation
        text = "def double(x):\n    return x + 1\n"
        assert world.tokenizer.decode(observation).count(text.strip()) == 1
        assert observation[0] == world.chat.render_observation((), (), [("", "")])[0]

    simulate(scenario)


def test_routed_experts_concatenate_over_turns_to_all_positions_but_the_last(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[LOOK], [FIX], [FINISH]])
        num_tokens = sum(t.context_ids.shape[0] + t.token_ids.shape[0] for t in rollout.turns)
        segments = [open_routes(one) for turn in rollout.turns for one in turn.route_segments]
        ends = [one.first_position + one.routes.shape[0] for one in segments]
        assert [one.first_position for one in segments] == [0, *ends[:-1]]
        assert ends[-1] == num_tokens - 1

    simulate(scenario)


def test_each_turn_has_its_own_seed_and_the_same_one_each_time(simulate) -> None:
    seeds: list[list[int]] = []

    async def scenario(world: World) -> None:
        await run_one(world, [[LOOK], [FINISH]])
        seeds.append([request.sampling.seed for request in world.policy.requests])
        end_id = world.chat.end_id
        assert {r.sampling.stop_token_ids for r in world.policy.requests} == {(end_id,)}

    simulate(scenario)
    simulate(scenario)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


def test_versions_that_change_in_mid_turn_are_told_apart(simulate) -> None:
    async def scenario(world: World) -> None:
        world.policy.slow_sessions["g0-m0"] = 1.0
        world.policy.scripts = lambda _session: [[LOOK], [FINISH]]
        world.host(world.policy)
        world.host_machines()
        world.host_worker()
        await world.publish(make_command("g0-m0"))
        while not world.policy.requests:
            await world.sleep(0.01)
        await world.sleep(4.0)
        world.policy.policy_version = 1
        rollout = (await world.wait_for(RolloutFinished, 1))[0]
        first, second = (
            [(s.policy_version, s.num_tokens) for s in turn.version_spans] for turn in rollout.turns
        )
        num_tokens = rollout.turns[0].token_ids.shape[0]
        assert first == [(0, 6), (1, num_tokens - 6)]
        assert [version for version, _ in second] == [1]
        assert rollout.min_policy_version == 0

    simulate(scenario)


def test_a_turn_without_a_call_ends_the_episode(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[LOOK], []])
        assert (rollout.end, len(rollout.turns)) == (EpisodeEnd.FINISHED, 2)
        assert rollout.files == {}

    simulate(scenario)


def test_several_calls_of_one_turn_are_observed_in_order(simulate) -> None:
    async def scenario(world: World) -> None:
        other = ("read_file", {"path": "other.py"})
        rollout = await run_one(world, [[LOOK, other], [FINISH]])
        text = world.tokenizer.decode(int32_list(rollout.turns[1].context_ids))
        assert text.index("x + 1") < text.index("x = 1")
        assert rollout.num_calls == 3

    simulate(scenario)


def test_turn_limit(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[LOOK]] * 9, num_turns_max=2)
        assert (rollout.end, len(rollout.turns)) == (EpisodeEnd.TURN_LIMIT, 2)

    simulate(scenario)


def test_token_limit(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[LOOK]] * 9, num_tokens_max=80, num_turns_max=9)
        assert rollout.end is EpisodeEnd.TOKEN_LIMIT
        num_tokens = sum(t.context_ids.shape[0] + t.token_ids.shape[0] for t in rollout.turns)
        assert num_tokens <= 80

    simulate(scenario)


def test_a_prompt_that_fills_the_context_ends_before_the_first_turn(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[LOOK]], num_tokens_max=5)
        assert (rollout.end, rollout.turns) == (EpisodeEnd.TOKEN_LIMIT, [])

    simulate(scenario)


def test_time_limit(simulate) -> None:
    """Only what the policy's programs run for counts."""

    async def scenario(world: World) -> None:
        world.backend.exec_s = 1.0
        rollout = await run_one(world, [[GREP]] * 9, wall_s_max=2.5, num_turns_max=9)
        assert rollout.end is EpisodeEnd.TIME_LIMIT
        assert len(rollout.turns) == 3

    simulate(scenario)


def test_slow_generators_and_hosts_take_no_time_of_the_policys(simulate, monkeypatch) -> None:
    pressure = itertools.count(step=5_000_000)
    monkeypatch.setattr(actor, "_starved_us", lambda: next(pressure))

    async def scenario(world: World) -> None:
        world.policy.token_s = 1.0
        world.backend.delay_s = 3.0
        world.backend.exec_s = 5.0
        rollout = await run_one(world, [[GREP], [LOOK], [GREP], [FINISH]], wall_s_max=5.0)
        assert rollout.end is EpisodeEnd.FINISHED
        assert rollout.wall_s > 20.0

    simulate(scenario)


def test_a_cut_turn_is_told_to_the_policy_and_counts_as_invalid(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[FIX], [FINISH]], turn_tokens_max=4)
        assert rollout.turns[0].parse_error.startswith("unfinished")
        assert rollout.turns[0].calls == []
        assert rollout.num_invalid_calls == 1
        assert rollout.end is EpisodeEnd.FINISHED
        text = world.tokenizer.decode(int32_list(rollout.turns[1].context_ids))
        assert "error: unfinished" in text

    simulate(scenario)


def test_a_broken_turn_can_end_the_episode(simulate) -> None:
    async def scenario(world: World) -> None:
        world.policy.scripts = lambda _session: [[FIX]]
        world.host(world.policy)
        world.host_machines()
        world.host_worker(ends_on_parse_error=True)
        await world.publish(make_command("g0-m0", make_task(turn_tokens_max=4)))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert (rollout.end, len(rollout.turns)) == (EpisodeEnd.POLICY_ERROR, 1)

    simulate(scenario)


def test_wrong_calls_count_and_the_episode_goes_on(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = await run_one(world, [[("teleport", {})], [FINISH]])
        assert (rollout.num_calls, rollout.num_invalid_calls) == (2, 1)
        assert rollout.end is EpisodeEnd.FINISHED

    simulate(scenario)


def test_deleted_files_and_new_files_are_told(simulate) -> None:
    async def scenario(world: World) -> None:
        delete = ("delete_file", {"path": "other.py"})
        write = ("write_file", {"path": "new.py", "content": "y = 1"})
        cache = ("write_file", {"path": "__pycache__/m.pyc", "content": "x"})
        rollout = await run_one(world, [[delete, write, cache], [FINISH]])
        assert rollout.deleted == ["other.py"]
        assert rollout.files == {"new.py": b"y = 1"}

    simulate(scenario)


def test_leaving_too_much_behind_is_the_policys_own_fault(simulate) -> None:
    async def scenario(world: World) -> None:
        world.policy.scripts = lambda _session: [[FIX], [FINISH]]
        world.host(world.policy)
        world.host_machines()
        world.host_worker(files_bytes_max=8)
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert (rollout.end, rollout.files) == (EpisodeEnd.POLICY_ERROR, {})
        assert "more than 8 bytes" in rollout.error

    simulate(scenario)


def test_one_slow_episode_holds_up_no_other(simulate) -> None:
    async def scenario(world: World) -> None:
        world.policy.slow_sessions["slow"] = 2.0
        world.host(world.policy)
        world.host_machines()
        world.host_worker(num_concurrent=2)
        await world.publish(make_command("slow"))
        await world.publish(*[make_command(f"fast-{n}") for n in range(8)])
        done = await world.wait_for(RolloutFinished, 8)
        assert {rollout.rollout_id for rollout in done} == {f"fast-{n}" for n in range(8)}
        await world.wait_for(RolloutFinished, 9)

    simulate(scenario)
