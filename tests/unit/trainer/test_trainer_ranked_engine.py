"""The engine of ranks against ranks that fail as real ones do: they start again, or are silent."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from tests.sim.trainer.conftest import FakeContext, Log, MemoryStore, World

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.ranks import engine as module
from penstock.actors.trainer.ranks.engine import RankedEngine
from penstock.messages.errors import (
    CorruptDataError,
    DeadlineError,
    PublishConflictError,
    RemoteCallError,
)
from penstock.messages.requests.ranks import (
    JoinRank,
    LoadRank,
    MakeVersion0,
    RankLoaded,
    RankSaved,
    StepTaken,
    TakeStep,
)
from penstock.messages.rpc import Ack
from penstock.messages.training import BatchManifest

NUM_RANKS = 2
CONFIG = TrainerConfig(engine="ranks", ranks=RanksConfig(num_ranks=NUM_RANKS, restarts_max=3))


class Ranks:
    """Two ranks, which lose all they hold when they start again."""

    def __init__(self) -> None:
        self.sessions = ["", ""]
        self.steps = [-1, -1]
        self.asked: list[str] = []
        self.fails: dict[int, Exception] = {}
        """Step -> what rank 1 does, once, instead of taking it."""
        self.salt = ""
        self.num_restarts = 0
        self.make: Callable[[], Awaitable[str]]
        """Makes version 0, on rank 0; returns its checkpoint."""

    def restart(self) -> None:
        self.num_restarts += 1
        self.sessions, self.steps = ["", ""], [-1, -1]

    async def request(self, service, message, *, idle_s):
        rank = int(service.removeprefix("rank."))
        if isinstance(message, JoinRank) and self.sessions[rank] not in {"", message.session}:
            self.restart()
            raise RemoteCallError("gone", "another session")
        if isinstance(message, JoinRank | LoadRank) and not self.sessions[rank]:
            self.sessions[rank] = message.session
        if message.session != self.sessions[rank]:
            raise RemoteCallError("gone", "another session")
        yield Ack()
        match message:
            case MakeVersion0():
                assert rank == 0
                yield RankSaved(object_key=await self.make())
            case LoadRank():
                self.asked.append(f"load {rank}")
                self.steps[rank] = 0
                yield RankLoaded(
                    step=0, object_key=message.object_key, weights_digest="w0", shapes={}, probe=[]
                )
            case TakeStep(step=step):
                assert step == self.steps[rank] + 1
                if rank == 1 and (error := self.fails.pop(step, None)):
                    self.restart()
                    raise error
                self.asked.append(f"step {step} {rank}")
                self.steps[rank] = step
                digest = f"w{step}{self.salt}"
                yield StepTaken(
                    weights_digest=digest, optimizer_digest="o", metrics={}, staleness_tokens={}
                )


@pytest.fixture(scope="module")
def objects():
    """A store with version 0."""
    world = World(0)

    async def make():
        await world.trainer().start(FakeContext(world.log, world.store))

    asyncio.run(make())
    return world.store.objects


@pytest.fixture
def world(objects, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    store, ranks = MemoryStore(), Ranks()
    store.objects = dict(objects)
    return FakeContext(Log(), store), ranks, RankedEngine(PolicyConfig(), CONFIG, ranks.request)


async def load(ctx, engine):
    (key,) = await ctx.store.keys("checkpoints/")
    return await engine.load(ctx, key)


async def step(ctx, engine, number):
    manifest = BatchManifest(step=number, policy_version=number - 1, groups=[])
    return await engine.step(ctx, manifest, TrainerConfig(), None)


async def test_all_ranks_take_each_step_and_the_figures_are_rank_0_s(world):
    ctx, ranks, engine = world
    assert (await load(ctx, engine)).step == 0
    assert (await step(ctx, engine, 1)).weights_digest == "w1"
    assert sorted(ranks.asked) == ["load 0", "load 1", "step 1 0", "step 1 1"]


@pytest.mark.parametrize(
    "error", [DeadlineError("silence"), RemoteCallError("failed", "RuntimeError: gloo")]
)
async def test_a_failed_step_is_taken_again_from_the_checkpoint(world, error):
    ctx, ranks, engine = world
    await load(ctx, engine)
    await step(ctx, engine, 1)
    ranks.fails[2] = error
    ranks.asked.clear()
    assert (await step(ctx, engine, 2)).weights_digest == "w2"
    by_rank_1 = [each for each in ranks.asked if each.endswith("1")]
    assert by_rank_1 == ["load 1", "step 1 1", "step 2 1"]


async def test_other_bits_after_a_new_start_are_an_error(world):
    ctx, ranks, engine = world
    await load(ctx, engine)
    await step(ctx, engine, 1)
    ranks.restart()
    ranks.salt = "'"
    with pytest.raises(CorruptDataError, match="step 1: trained to weights w1' again, w1 before"):
        await step(ctx, engine, 2)


async def test_version_0_is_loaded_by_the_ranks_that_made_it(world, objects):
    ctx, ranks, engine = world
    ctx.store.objects.clear()

    async def make():
        ctx.store.objects |= objects
        (key,) = await ctx.store.keys("checkpoints/")
        return key

    ranks.make = make
    assert (await engine.make_version_0(ctx, 0)).step == 0
    assert (await step(ctx, engine, 1)).weights_digest == "w1"
    assert ranks.num_restarts == 0


async def test_other_weights_than_those_published_are_no_reason_to_start_again(world):
    ctx, ranks, engine = world

    class Conflicting:
        num_asked = 0

        async def publish_shards(self, _version):
            self.num_asked += 1
            raise PublishConflictError("weights 0: committed before with digest a, now b")

    publisher = Conflicting()
    engine = RankedEngine(PolicyConfig(), CONFIG, ranks.request, publisher.publish_shards)
    await load(ctx, engine)
    with pytest.raises(PublishConflictError, match="committed before with digest a, now b"):
        await engine.publish(ctx, 0)
    assert (publisher.num_asked, ranks.num_restarts) == (1, 0)


async def test_ranks_of_an_earlier_trainer_start_again(world):
    ctx, ranks, engine = world
    ranks.sessions = ["earlier", "earlier"]
    assert (await load(ctx, engine)).step == 0
    assert (await step(ctx, engine, 1)).weights_digest == "w1"


async def test_what_is_wrong_in_itself_is_not_repeated(world):
    ctx, ranks, engine = world
    await load(ctx, engine)
    ranks.fails[1] = RemoteCallError("invalid", "ValueError: its turns have 3 tokens")
    with pytest.raises(CorruptDataError, match="its turns have 3 tokens"):
        await step(ctx, engine, 1)
    assert "step 1 1" not in ranks.asked


async def test_failures_without_end_are_the_trainer_s(world):
    ctx, ranks, engine = world
    await load(ctx, engine)

    class Always(dict):
        def pop(self, key, default=None):
            return DeadlineError("silence")

    ranks.fails = Always()
    with pytest.raises(DeadlineError, match="silence"):
        await step(ctx, engine, 1)


def test_a_request_is_small_whatever_the_batch():
    assert len(msgspec.msgpack.encode(TakeStep(session="0" * 16, step=10**6))) < 100
