"""Training on ranks: real processes on a real event server, one of which is killed or hangs."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE

import msgspec
import pytest
import tomli_w
from tests.sealed import open_vault
from tests.sim.trainer.conftest import World, small_config

from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.history import read_back
from penstock.actors.runtime.host import ActorHost
from penstock.actors.trainer.actor import Trainer
from penstock.actors.trainer.checkpoint import newest_checkpoint, read_head
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.replay import REPLAY_TYPES, ReplayLog, replay
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.config.file import load_config
from penstock.infra.ranks.build import training_engine
from penstock.infra.run import liveness
from penstock.infra.run.launcher import Processes
from penstock.infra.run.roles import Assembly, build_actors
from penstock.infra.run.runs import RunDir
from penstock.messages.control import ActorFailed, RunFinished
from penstock.messages.errors import BusError
from penstock.messages.reading.trajectories import last_of
from penstock.messages.training import BatchManifest, StepCompleted
from penstock.messages.weights import WeightsPublished

DEADLINE_S = 120.0
NUM_STEPS = 4


def set_fields(settings):
    """TOML has no null."""
    return {n: v for n, v in msgspec.structs.asdict(settings).items() if v is not None}


def run_folder(path, world):
    run = RunDir(path / "run-1")
    run.path.mkdir()
    tables = {
        "trainer": set_fields(world.config),
        "policy": set_fields(world.policy),
        "pacer": {"groups_per_batch": 2, "staleness_max": 20, "steps_max": NUM_STEPS},
        "regions": [{"name": "west", "serves": ["train", "eval", "live"]}],
        "processes": {"trainer": ["trainer"]},
    }
    run.config.write_text(tomli_w.dumps(msgspec.to_builtins(tables)))
    return run


@contextlib.asynccontextmanager
async def opened(run, world):
    """Yield the bus of a run whose rollouts are on the log."""
    server = EmbeddedServer(store_dir=run.events)
    await server.start()
    run.write_state(server.url)
    bus = await NatsBus.connect(server.url, run_id=run.run_id, store=run.store(), name="test")
    try:
        await bus.provision()
        for key, data in world.store.objects.items():
            await run.store().put(key, data)
        for index in range(40):
            for member in range(3):
                await bus.publish(world._rollout(index, member, 0))
        yield bus
    finally:
        await bus.close()
        await server.stop()


@contextlib.asynccontextmanager
async def trained(run, config, bus):
    """Run a trainer of this process."""
    engine = training_engine(config, run.store(), bus.stream_request)
    trainer = Trainer(config.trainer, config.policy, engine, 7, open_vault())
    host = ActorHost(trainer, bus, run.store(), name="trainer", seed=7)
    task = asyncio.create_task(host.run(asyncio.Event()))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(bus, event_type, task, key=None):
    async def found():
        async for delivery in bus.follow([event_type]):
            if key is None or delivery.event.key() == key:
                return

    looking = asyncio.create_task(found())
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([looking, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    looking.cancel()


async def events(bus, *types):
    return [each.event async for each in bus.follow(types, stop_at_end=True)]


async def replayed(run, config, bus):
    log = ReplayLog(
        deliveries=bus.follow(REPLAY_TYPES, stop_at_end=True),
        last=last_of(bus),
        store=run.store(),
        opener=open_vault(),
    )
    return await replay(log, config.policy, config.trainer)


async def replay_told(run, num_ranks):
    """What `penstock replay` prints."""
    command = [sys.executable, "-m", "penstock.infra.cli", "--runs-dir", run.path.parent]
    process = await asyncio.create_subprocess_exec(
        *command, "replay", run.run_id, "--json", "--ranks", str(num_ranks), stdout=PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        told, _ = await process.communicate()
    return process.returncode, json.loads(told)


async def test_of_two_trainers_the_second_waits_and_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "ANSWER_S", 0.5)
    monkeypatch.setattr(liveness, "TRAINER_S_MAX", 0.0)
    changes = {"steps_max": NUM_STEPS, "staleness_max": 20, "ranks": RanksConfig(num_ranks=2)}
    world = World(0, small_config(**changes, engine="ranks"))
    run = run_folder(tmp_path, world)
    config = load_config(run.config)
    async with opened(run, world) as bus, contextlib.AsyncExitStack() as later:
        first, second = [
            await NatsBus.connect(run.read_state().url, run_id="run-1", store=run.store(), name=n)
            for n in ("first", "second")
        ]
        later.push_async_callback(second.close)
        await build_actors("trainer", Assembly(run, config, first, run.store()))
        monkeypatch.setattr(liveness, "ANSWER_S", 20.0)  # One that is up is never missed.
        with pytest.raises(BusError, match="its ranks belong to another trainer, which is running"):
            await build_actors("trainer", Assembly(run, config, second, run.store()))
        await first.close()
        monkeypatch.setattr(liveness, "ANSWER_S", 0.5)
        await build_actors("trainer", Assembly(run, config, second, run.store()))
        monkeypatch.setattr(liveness, "ANSWER_S", 20.0)
        with pytest.raises(BusError, match="another trainer"):
            await build_actors("trainer", Assembly(run, config, bus, run.store()))


async def test_of_trainers_that_hear_nobody_at_the_same_time_one_gets_the_ranks(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(liveness, "ANSWER_S", 0.5)
    monkeypatch.setattr(liveness, "TRAINER_S_MAX", 0.0)
    world = World(0, small_config(steps_max=NUM_STEPS, staleness_max=20))
    run = run_folder(tmp_path, world)
    async with opened(run, world), contextlib.AsyncExitStack() as later:
        buses = [
            await NatsBus.connect(run.read_state().url, run_id="run-1", store=run.store(), name=n)
            for n in ("first", "second", "third")
        ]
        for bus in buses:
            later.push_async_callback(bus.close)
        asked = await asyncio.gather(*map(liveness.become_trainer, buses), return_exceptions=True)
        refused = [error for error in asked if isinstance(error, BusError)]
        assert asked.count(None) == 1 and len(refused) == 2, asked
        winner = buses[asked.index(None)]
        await winner.close()
        buses.remove(winner)
        await liveness.become_trainer(buses[0])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_changes_no_bit(tmp_path, number):
    ranks = RanksConfig(num_ranks=2, step_s_max=20.0)
    changes = {"steps_max": NUM_STEPS, "staleness_max": 20, "checkpoint_steps": 3}
    world = World(0, small_config(**changes, engine="ranks", ranks=ranks))
    run = run_folder(tmp_path, world)
    config = load_config(run.config)
    async with opened(run, world) as bus:
        processes = Processes(run, config, ["rank-0", "rank-1"])
        watching = asyncio.create_task(processes.watch(bus))
        try:
            async with trained(run, config, bus) as task:
                await until(bus, BatchManifest, task, "3")
                if number is signal.SIGKILL:  # In mid-step: it waits for rank 0, which is stopped.
                    os.kill(processes.pid("rank-0"), signal.SIGSTOP)
                    await asyncio.sleep(2.0)
                    assert len(await events(bus, StepCompleted)) == 2, "step 3 is in progress"
                os.kill(processes.pid("rank-1"), number)
                await until(bus, RunFinished, task)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await processes.stop()
        steps = await events(bus, StepCompleted)
        assert [step.step for step in steps] == [1, 2, 3, 4]
        failed = [each for each in await events(bus, ActorFailed) if each.actor.startswith("rank-")]
        assert failed, "the launcher saw a rank end"
        report = await replayed(run, config, bus)
        assert (report.identical, report.steps_compared) == (True, NUM_STEPS), report
        for num_ranks in (1, 2):
            code, told = await replay_told(run, num_ranks)
            assert (code, told["identical"], told["steps_compared"]) == (0, True, NUM_STEPS), told
            assert told["weights_digest"] == steps[-1].weights_digest
        published = await events(bus, WeightsPublished)
        assert [each.policy_version for each in published] == [0, 1, 2, 3, 4]
        assert all(len(each.shards) >= 2 for each in published)
        flat, manifest = await read_back(StoreIO(run.store()), NUM_STEPS)
        assert flat.digest() == manifest.target_root_digest == published[-1].target_root_digest
        head = await read_head(run.store(), await newest_checkpoint(run.store()))
        assert head.weights_digest == steps[-1].weights_digest
        assert len(head.stored.pieces) == 2, "one of each rank"
