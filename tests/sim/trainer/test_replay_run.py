"""`penstock replay` over a run directory: a real event server, a real store, a killed trainer."""

import asyncio
import contextlib
from argparse import Namespace

import msgspec
import pytest
import tomli_w
from tests.sealed import open_vault

from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.runtime.host import ActorHost
from penstock.actors.trainer.actor import Trainer
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.commands.replay import replay_command
from penstock.infra.run.runs import RunDir
from penstock.messages.control import RunFinished
from penstock.messages.errors import NotFoundError
from penstock.messages.training import StepCompleted

DEADLINE_S = 40.0


def arguments(runs_dir, *, json):
    fields = {"config": None, "what_if": [], "output": None, "no_evaluation": False}
    fields |= {"ranks": 1, "rank_log": None}
    return Namespace(run="run-1", runs_dir=runs_dir, json=json, **fields)


@pytest.fixture
def run_dir(tmp_path, make_world):
    world = make_world(steps_max=4, staleness_max=20, checkpoint_steps=2)
    run = RunDir(tmp_path / "run-1")
    run.path.mkdir()
    tables = {
        "trainer": set_fields(world.config),
        "policy": set_fields(world.trainer()._policy_config),
        "pacer": {"groups_per_batch": 2, "staleness_max": 20, "steps_max": 4},
        "regions": [{"name": "west", "serves": ["train", "eval", "live"]}],
        "processes": {"all": ["trainer"]},
    }
    run.config.write_text(tomli_w.dumps(msgspec.to_builtins(tables)))
    return run, world


def set_fields(settings):
    """TOML has no null."""
    return {n: v for n, v in msgspec.structs.asdict(settings).items() if v is not None}


async def train(run, world):
    """Fill the log, and let two trainers, the first of them killed, take all steps."""
    server = EmbeddedServer(store_dir=run.events)
    await server.start()
    store = run.store()
    bus = await NatsBus.connect(server.url, run_id=run.run_id, store=store, name="test")
    try:
        await bus.provision()
        for key, data in world.store.objects.items():
            await store.put(key, data)
        for index in range(40):
            for member in range(3):
                await bus.publish(world._rollout(index, member, 0))
        for event_type in (StepCompleted, RunFinished):
            engine = LocalEngine(world.policy, world.config, Publisher(StoreIO(store)))
            trainer = Trainer(world.config, world.policy, engine, 7, open_vault())
            host = ActorHost(trainer, bus, store, name="trainer", seed=7)
            task = asyncio.create_task(host.run(asyncio.Event()))
            async with asyncio.timeout(DEADLINE_S):
                async for _ in bus.follow([event_type]):
                    break
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        await bus.close()
        await server.stop()


async def test_it_proves_a_run_and_names_what_differs(run_dir, tmp_path, capsys):
    run, world = run_dir
    await train(run, world)
    assert await replay_command(arguments(tmp_path, json=True)) == 0
    figures = msgspec.json.decode(capsys.readouterr().out)
    assert (figures["steps"], figures["steps_compared"], figures["identical"]) == (4, 4, True)
    assert figures["speedup"] > 0
    text = run.config.read_text()
    run.config.write_text(text.replace("rms_norm_eps = 1e-06", "rms_norm_eps = 1e-03", 1))
    assert text != run.config.read_text()
    assert await replay_command(arguments(tmp_path, json=False)) == 1
    shown = capsys.readouterr()
    assert "first difference: step 1: weights" in shown.out
    assert "step 4: weights" in shown.err


async def test_a_run_without_version_0_is_named(run_dir, tmp_path):
    run, _ = run_dir
    server = EmbeddedServer(store_dir=run.events)
    await server.start()
    bus = await NatsBus.connect(server.url, run_id=run.run_id, store=run.store(), name="test")
    await bus.provision()
    await bus.close()
    await server.stop()
    with pytest.raises(NotFoundError, match="no checkpoint of version 0"):
        await replay_command(arguments(tmp_path, json=True))
