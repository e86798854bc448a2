"""How much of the prompts several replicas of a region find in their caches.

Real engines behind the real services on an embedded nats-server; sessions as training has them:
groups of a few that begin with the same prompt, each with several turns, many at a time.
"""

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.actors.generator.actor import Generator
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.replicas.client import stream_chunks
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import SampledTokens
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.host_context import ActorIdentity, HostContext
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.directory import DirectoryStore
from penstock.kernels.arrays import to_array
from penstock.messages.generation import Generate, ReplicaReported
from penstock.messages.task import Purpose, Sampling

NUM_REPLICAS = (1, 4)
NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 12, 8, 6
NUM_SESSIONS_OPEN = 32
"""Sessions in progress at once, as `rollout_worker.num_concurrent` of the quickstart."""
SYSTEM_TOKENS, TASK_TOKENS, REPLY_TOKENS, OBSERVATION_TOKENS = 160, 96, 24, 40
IDLE_S = 60.0
POLICY = PolicyConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    moe_intermediate_size=64,
    mtp_num_heads=0,
)


_Site = tuple[Context, ReplicaTable, list[TorchEngine]]


async def measure_prefix_reuse(num_groups: int = NUM_GROUPS) -> dict[str, Any]:
    """Run the same sessions against one replica and against four."""
    found = {count: await _cached_share(count, num_groups) for count in NUM_REPLICAS}
    one, several = (found[count] for count in NUM_REPLICAS)
    return {
        "sessions": num_groups * GROUP_SIZE,
        "cached_share_1_replica": round(one, 4),
        "cached_share_4_replicas": round(several, 4),
        "prefix_reuse_4_replicas": round(several / one, 4),
    }


async def _cached_share(num_replicas: int, num_groups: int) -> float:
    """Return the share of all prompt tokens that were in a cache."""
    async with _site(num_replicas) as (ctx, replicas, engines):
        room = asyncio.Semaphore(NUM_SESSIONS_OPEN)
        prompts = _prompts(num_groups)
        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                group.create_task(_session(ctx, replicas, room, f"s{number}", prompt))
        metrics = [engine.metrics() for engine in engines]
    cached = sum(one.num_cached_tokens for one in metrics)
    return cached / (cached + sum(one.num_prefill_tokens for one in metrics))


def _prompts(num_groups: int) -> list[list[int]]:
    """Return each session's prompt: all share the system's, each group a task's."""
    dice = random.Random("prompts")

    def draw(count: int) -> list[int]:
        return [dice.randrange(POLICY.vocab_size) for _ in range(count)]

    system = draw(SYSTEM_TOKENS)
    tasks = [system + draw(TASK_TOKENS) for _ in range(num_groups)]
    return [task for task in tasks for _ in range(GROUP_SIZE)]


async def _session(
    ctx: Context, replicas: ReplicaTable, room: asyncio.Semaphore, session: str, prompt: list[int]
) -> None:
    """Take the turns of a session; each begins with all that was said before."""
    dice = random.Random(session)
    async with room:
        context = list(prompt)
        for turn in range(NUM_TURNS):
            request = Generate(
                request_id=f"{session}.{turn}",
                session_id=session,
                purpose=Purpose.TRAIN,
                token_ids=to_array(np.asarray(context, np.int32)),
                sampling=Sampling(num_tokens_max=REPLY_TOKENS, seed=turn),
            )
            sampled = SampledTokens()
            replicas.place(session, Purpose.TRAIN, request.channel)
            chunks = stream_chunks(
                ctx, replicas, request, set(), idle_s=IDLE_S, reason=request.request_id
            )
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    sampled.add(chunk)
            context += sampled.token_ids
            context += [dice.randrange(POLICY.vocab_size) for _ in range(OBSERVATION_TOKENS)]


@contextlib.asynccontextmanager
async def _site(num_replicas: int) -> AsyncGenerator[_Site]:
    """Yield a client's context, the replicas it sees, and their engines."""
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        store = DirectoryStore(folder / "objects")
        server = EmbeddedServer(store_dir=folder / "nats")
        await server.start()
        stack.push_async_callback(server.stop)

        async def connect(name: str) -> NatsBus:
            bus = await NatsBus.connect(server.url, run_id="bench", store=store, name=name)
            stack.push_async_callback(bus.close)
            return bus

        bus = await connect("client")
        await bus.provision()
        identity = ActorIdentity(name="client", seed=0, incarnation="1")
        ctx = HostContext(identity, bus=bus, store=store, clock=SystemClock())
        stack.push_async_callback(ctx.close)
        engines = [await _engine(stack) for _ in range(num_replicas)]
        buses = [await connect(f"generator-{number}") for number in range(num_replicas)]
        group = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(stop.set)
        for number, (engine, own) in enumerate(zip(engines, buses, strict=True)):
            generator = Generator(engine, [Purpose.TRAIN], "bench", f"bench.{number}")
            host = ActorHost(generator, own, store, name=f"generator-bench.{number}", seed=0)
            group.create_task(host.run(stop))
        replicas, are_ready = ReplicaTable(), asyncio.Event()
        following = group.create_task(_follow(bus, replicas, ctx, are_ready, num_replicas))
        stack.callback(following.cancel)
        async with asyncio.timeout(IDLE_S):
            await are_ready.wait()
        yield ctx, replicas, engines


async def _follow(
    bus: NatsBus, replicas: ReplicaTable, ctx: Context, are_ready: asyncio.Event, num_replicas: int
) -> None:
    """See the replicas, as an actor does."""
    async for delivery in bus.follow([ReplicaReported]):
        assert isinstance(delivery.event, ReplicaReported)
        replicas.add(delivery.event, ctx.monotonic())
        if len(replicas.ready(Purpose.TRAIN)) == num_replicas:
            are_ready.set()


async def _engine(stack: contextlib.AsyncExitStack) -> TorchEngine:
    """Start an engine; all hold the same weights."""
    engine = TorchEngine(POLICY, EngineOptions(num_running_max=48, num_tokens_max=768))
    engine.start()
    stack.push_async_callback(engine.stop)
    state = publishable_state(Policy(POLICY, seed=0))
    await engine.begin_update()
    await engine.apply({name: as_numpy(tensor) for name, tensor in state.items()})
    await engine.commit(0)
    return engine
