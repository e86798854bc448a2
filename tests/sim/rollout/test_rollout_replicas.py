"""Several replicas behind one worker: affinity, fallback, and what a lost one costs."""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from tests.sim.rollout.conftest import (
    FINISH,
    FIX,
    LOOK,
    Hosted,
    ScriptedPolicy,
    World,
    make_command,
    reported,
)

from penstock.actors.policy.replicas.client import (
    ReplicaLostError,
    WrongVersionError,
    stream_chunks,
)
from penstock.actors.policy.replicas.table import SILENT_S, ReplicaTable, preferred
from penstock.kernels.arrays import to_array
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.generation import NEWEST, Generate, pinned
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, TurnSampled
from penstock.messages.task import Purpose, Sampling

SCRIPT = [[LOOK], [FIX], [LOOK], [FINISH]]
A, B = "west.a", "west.b"
OWN = preferred("g0-m0", [A, B])
OTHER = B if OWN == A else A


class Region:
    """Replicas by name, each a process of its own."""

    def __init__(self, world: World, *names: str) -> None:
        self._world = world
        self.policies: dict[str, ScriptedPolicy] = {}
        self.hosted: dict[str, Hosted] = {}
        world.policy.scripts = lambda _session: SCRIPT
        for name in names:
            self.start(name)

    def start(self, name: str) -> ScriptedPolicy:
        policy = ScriptedPolicy(self._world.tokenizer, name)
        policy.scripts = lambda _session: SCRIPT
        self.policies[name] = policy
        self.hosted[name] = self._world.host(policy, f"generator-{name}")
        return policy

    def sessions(self) -> dict[str, set[str]]:
        """Return the replicas that each session was at."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name, policy in self.policies.items():
            for request in policy.requests:
                found[request.session_id].add(name)
        return found


def request(**changes: object) -> Generate:
    fields: dict = {
        "request_id": "r", "session_id": "g0-m0", "purpose": Purpose.TRAIN,
        "token_ids": to_array(np.array([1, 2], np.int32)), "sampling": Sampling(),
        "channel": NEWEST,
    }  # fmt: skip
    return Generate(**{**fields, **changes})


def test_sessions_are_spread_by_load_and_each_stays_at_its_replica(simulate) -> None:
    async def scenario(world: World) -> None:
        region = Region(world, A, B)
        world.host_machines()
        world.host_worker()
        await asyncio.sleep(1.0)
        names = [f"g{n}-m0" for n in range(12)]
        await world.publish(*[make_command(name) for name in names])
        await world.wait_for(RolloutFinished, len(names))
        sessions = region.sessions()
        assert set(sessions) == set(names)
        assert {len(where) for where in sessions.values()} == {1}, "all its turns"
        counts = Counter(where for one in sessions.values() for where in one)
        assert counts == {A: 6, B: 6}, "by name it would be uneven"
        assert Counter(preferred(name, [A, B]) for name in names) != counts

    simulate(scenario)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_replica_lost_in_the_middle_of_a_turn_costs_that_turn_alone(simulate, how) -> None:
    async def scenario(world: World) -> None:
        region = Region(world, A, B)
        world.host_machines()
        world.host_worker(generate_idle_s=1000.0)
        await asyncio.sleep(1.0)
        region.policies[OWN].token_s = 5.0
        await world.publish(make_command("g0-m0"))
        await world.wait_for(TurnSampled, 1, within_s=1000.0)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)
        await (region.hosted[OWN].kill() if how == "killed" else region.hosted[OWN].stop())
        [rollout] = await world.wait_for(RolloutFinished, 1)
        took_s = asyncio.get_running_loop().time() - began
        assert took_s < (SILENT_S + 5.0 if how == "killed" else 4.0), "not the silence of a chunk"
        assert rollout.end is EpisodeEnd.FINISHED
        assert len(rollout.turns) == len(SCRIPT)
        assert region.sessions()["g0-m0"] == {OWN, OTHER}
        await world.check_ledger()

    simulate(scenario)


def test_a_replica_that_started_again_has_lost_what_it_was_asked(simulate) -> None:
    async def scenario(world: World) -> None:
        region = Region(world, A)
        world.host_machines()
        world.host_worker(generate_idle_s=1000.0)
        await asyncio.sleep(1.0)
        region.policies[A].token_s = 100.0
        await world.publish(make_command("g0-m0"))
        await asyncio.sleep(2.0)
        await region.hosted[A].kill()
        region.start(A)
        [rollout] = await world.wait_for(RolloutFinished, 1, within_s=5.0)
        assert len(rollout.turns) == len(SCRIPT)

    simulate(scenario)


def test_replicas_join_while_a_turn_waits_for_one(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        world.host_worker()
        await world.publish(make_command("g0-m0"))
        await asyncio.sleep(30.0)
        region = Region(world, B)
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.FINISHED
        assert region.sessions() == {"g0-m0": {B}}

    simulate(scenario)


def test_a_replica_that_breaks_every_turn_is_passed_over(simulate) -> None:
    async def scenario(world: World) -> None:
        region = Region(world, A, B)
        region.policies[OWN].breaks["g0-m0"] = 10**6
        world.host_machines()
        world.host_worker()
        await asyncio.sleep(1.0)
        await world.publish(make_command("g0-m0"))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.FINISHED
        assert len(region.policies[OTHER].requests) == len(SCRIPT)
        await world.check_ledger()

    simulate(scenario)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_two_replicas_and_the_bus_do_every_turn_is_stored_once(simulate, seed) -> None:
    async def scenario(world: World) -> None:
        region, dice = Region(world, A, B), random.Random(seed)
        world.set_faults(
            lose_receipt=0.05, lose_request=0.05, lose_reply=0.02, latency_s_max=0.02
        )  # fmt: skip
        world.host_machines()
        for _ in range(2):
            world.host_worker()
        names = [f"g{n}-m0" for n in range(8)]
        for policy in region.policies.values():
            policy.token_s = 0.05
        await world.publish(*[make_command(name) for name in names])
        for _ in range(6):
            await asyncio.sleep(dice.uniform(0.0, 4.0))
            victim = dice.choice([A, B])
            await dice.choice([region.hosted[victim].kill, region.hosted[victim].stop])()
            await asyncio.sleep(dice.uniform(0.0, 3.0))
            region.start(victim).token_s = 0.05
        ends = await world.wait_for(RolloutFinished, len(names))
        assert {end.rollout_id for end in ends} == set(names)
        broken = [end.error for end in ends if end.end is not EpisodeEnd.FINISHED]
        of_machines = [e for e in broken if e.startswith("sandbox.") or "no answer" in e]
        assert broken == of_machines, "machines are asked, too"
        assert len(broken) <= 2
        await world.check_ledger()

    simulate(scenario)


async def ask(world: World, table: ReplicaTable, asked: Generate) -> int:
    """Return how many chunks came."""
    chunks = stream_chunks(world.client(), table, asked, set(), idle_s=5.0, reason="test")
    async with contextlib.aclosing(chunks):
        return len([chunk async for chunk in chunks])


def test_another_version_than_the_pinned_one_is_an_error(simulate) -> None:
    async def scenario(world: World) -> None:
        region = Region(world, A)
        table = ReplicaTable()
        table.add(reported(4, A), 0.0)
        region.policies[A].policy_version = 5
        await asyncio.sleep(1.0)
        with pytest.raises(WrongVersionError, match="expected version 4, got 5"):
            await ask(world, table, request(channel=pinned(4)))
        with pytest.raises(DeadlineError):  # No replica says that it serves this one.
            await ask(world, table, request(channel=pinned(3)))
        assert await ask(world, table, request()) > 0

    simulate(scenario)


def test_an_absent_replica_is_found_out_at_once(simulate) -> None:
    async def scenario(world: World) -> None:
        table = ReplicaTable()
        table.add(reported(4, A), 0.0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(BusError, match="nobody serves it"):
            await ask(world, table, request())
        assert asyncio.get_running_loop().time() - began < 1.0

    simulate(scenario)


def test_a_silent_replica_loses_its_requests(simulate) -> None:
    async def scenario(world: World) -> None:
        region, table = Region(world, A), ReplicaTable()
        table.add(reported(0, A), 0.0)
        region.policies[A].token_s = 1e6
        await asyncio.sleep(1.0)
        asking = asyncio.create_task(ask(world, table, request()))
        await asyncio.sleep(1.0)
        table.expire(SILENT_S + 1.0)
        with pytest.raises(ReplicaLostError, match=A):
            await asking
        assert table.ready(Purpose.TRAIN) == []

    simulate(scenario)


def test_an_older_process_of_the_same_name_is_not_listened_to() -> None:
    table = ReplicaTable()
    table.add(reported(4, A, started_at=2.0), 0.0)
    table.add(reported(3, A, started_at=1.0, is_leaving=True), 1.0)
    assert [one.policy_version for one in table.ready(Purpose.TRAIN)] == [4]
