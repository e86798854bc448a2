"""Replicas of one region as processes of their own: they join, answer, leave and are lost."""

import asyncio
import subprocess
import tomllib

import numpy as np
import pytest
import tomli_w

from penstock.actors.policy.checkpoint import as_numpy, config_json, publishable_state
from penstock.actors.policy.model import Policy
from penstock.actors.policy.replicas.client import stream_chunks
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import SampledTokens
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, train_tokenizer
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host_context import ActorIdentity, HostContext
from penstock.infra.config.file import apply_overrides, load_config
from penstock.infra.run.command import fill_shape
from penstock.infra.run.launcher import event_server
from penstock.infra.run.runs import RunDir
from penstock.kernels.arrays import to_array
from penstock.messages.generation import Generate, ReplicaReported, pinned
from penstock.messages.task import Purpose, Sampling

from .launched import PENSTOCK, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def make_run(folder) -> RunDir:
    run = RunDir(folder / "r1")
    run.path.mkdir()
    data = apply_overrides(tomllib.loads(TINY.read_text()), [])
    fill_shape(data)
    run.config.write_text(tomli_w.dumps(data))
    return run


def start(run: RunDir, *roles: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*PENSTOCK, "--runs-dir", str(run.path.parent), "actor", *roles, "--run", "r1"]
    )


async def follow(bus, table: ReplicaTable, ctx) -> None:
    async for delivery in bus.follow([ReplicaReported]):
        table.add(delivery.event, ctx.monotonic())


async def until_ready(table: ReplicaTable, *names: str) -> None:
    async with asyncio.timeout(60.0):
        while {one.replica for one in table.ready(Purpose.TRAIN)} != {*names}:
            await asyncio.sleep(0.05)


async def test_replicas_of_a_region_join_answer_and_leave(tmp_path):
    run = make_run(tmp_path)
    config = load_config(run.config)
    processes: list[subprocess.Popen] = []
    async with event_server(run, config) as bus:
        identity = ActorIdentity(name="test", seed=0, incarnation="1")
        ctx = HostContext(identity, bus=bus, store=run.store(), clock=SystemClock())
        tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 8, config.policy.vocab_size)
        await run.store().put(TOKENIZER_KEY, tokenizer.to_json().encode())
        state = publishable_state(Policy(config.policy, seed=0))
        snapshot = {name: as_numpy(tensor) for name, tensor in state.items()}
        manifest = await Publisher(StoreIO(run.store())).prepare(
            0, snapshot, optimizer_step=0, config_json=config_json(config.policy)
        )
        await bus.publish([manifest])
        table = ReplicaTable()
        following = asyncio.create_task(follow(bus, table, ctx))

        async def sample(session: str) -> str:
            request = Generate(
                request_id=ctx.new_id(session), session_id=session, purpose=Purpose.TRAIN,
                channel=pinned(0), token_ids=to_array(np.arange(8, dtype=np.int32)),
                sampling=Sampling(num_tokens_max=4),
            )  # fmt: skip
            sampled = SampledTokens()
            async for chunk in stream_chunks(
                ctx, table, request, set(), idle_s=20.0, reason=session
            ):
                sampled.add(chunk)
            assert len(sampled.token_ids) == 4
            return sampled.replica

        try:
            processes.append(start(run, "relay:west", "generator:west/a"))
            await until_ready(table, "west.a")
            processes.append(start(run, "generator:west/b"))
            await until_ready(table, "west.a", "west.b")
            sessions = [f"g0-m{n}" for n in range(8)]
            homes = [await sample(session) for session in sessions]
            assert set(homes) == {"west.a", "west.b"}
            assert [await sample(session) for session in sessions] == homes
            processes[1].terminate()
            await until_ready(table, "west.a")
            assert processes[1].wait(20.0) == 0
            assert {await sample(session) for session in sessions} == {"west.a"}
        finally:
            for process in processes:
                process.kill()
                process.wait()
            following.cancel()
            await ctx.close()
