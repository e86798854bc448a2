"""A running rollout service, a scripted generator, and what stands around them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import msgspec
import pytest
from tests.e2e.gateway.conftest import ScriptedGenerator, _memory, _nats, until

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.tokenizer import Tokenizer, train_tokenizer
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.runtime.actor import Actor, Effects, Serve
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.host import ActorHost
from penstock.gateway.config import GatewayConfig
from penstock.gateway.keys import hash_key
from penstock.gateway.rollouts.config import RolloutsConfig
from penstock.gateway.rollouts.service import RolloutService
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.bus import Bus
from penstock.messages.generation import ReplicaReported
from penstock.messages.rollout import RolloutFinished, Turn, TurnSampled
from penstock.messages.task import Limits, Purpose, Sampling, Split, StartRollout, Task

KEY = "psk-rollouts"
TEXTS = ["def add(a, b):\n    return a + b\n", "The café is open. Look, edit, run, finish.\n"]


class TrainingGenerator(ScriptedGenerator):
    """Answers what training and evaluation ask."""

    def services(self) -> Mapping[str, Serve]:
        abort = super().services()[f"abort.{self.replica}"]
        purposes = (Purpose.TRAIN, Purpose.EVAL)
        return {f"generate.{one}.{self.replica}": self._generate for one in purposes} | {
            f"abort.{self.replica}": abort
        }

    async def on_tick(self, ctx: Context) -> Effects:
        return (
            ReplicaReported(
                region="west", replica=self.replica, started_at=0.0,
                serves=[Purpose.TRAIN, Purpose.EVAL], policy_version=7, num_running_max=64,
            ),
        )  # fmt: skip


def command(rollout_id: str = "g0-m0", **limits: int) -> StartRollout:
    bounds = {"num_turns_max": 8, "num_tokens_max": 4096, "turn_tokens_max": 256} | limits
    task = Task(
        task_id="t1", category="own", split=Split.TRAIN, instruction="Add.",
        files={"a.py": "x = 1\n"}, binaries={"b.bin": b"\xff"}, limits=Limits(**bounds),
    )  # fmt: skip
    group_id, _, member = rollout_id.partition("-m")
    return StartRollout(
        rollout_id=rollout_id, group_id=group_id, group_index=0, group_size=4, member=int(member),
        purpose=Purpose.TRAIN, task=task, policy_version=7,
        sampling=Sampling(temperature=1.0, seed=3, num_tokens_max=256),
    )  # fmt: skip


class Site:
    """One service; `restart` kills it and begins another one."""

    def __init__(self, bus: Bus, store: DirectoryStore, chat: PenstockChat, **settings) -> None:
        self.bus, self.store, self.chat = bus, store, chat
        self.generator = TrainingGenerator()
        self.config = RolloutsConfig(port=0, **settings)
        self.url = ""

    def service(self) -> RolloutService:
        self.url = ""
        return RolloutService(
            self.chat,
            self.config,
            RolloutWorkerConfig(generate_wait_s=5.0, retry_delay_s=0.01),
            GatewayConfig(port=0, context_tokens_max=4096),
            key_hash=hash_key(KEY),
            on_listening=lambda url: setattr(self, "url", url),
        )

    def will_reply(self, *turns: list[int]) -> None:
        from tests.e2e.gateway.conftest import Reply

        self.generator.replies += [Reply(token_ids=ids) for ids in turns]

    async def start(self, *commands: StartRollout) -> None:
        await self.bus.publish([*commands])

    async def events(self, kind):
        return [d.event async for d in self.bus.follow([kind], stop_at_end=True)]

    async def ends(self, num: int = 1) -> list[RolloutFinished]:
        async with asyncio.timeout(20):
            while len(found := await self.events(RolloutFinished)) < num:
                await asyncio.sleep(0.02)
        return found

    async def turns(self) -> list[Turn]:
        return [event.turn for event in await self.events(TurnSampled)]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Host a service during a block, and kill it at the end of the block."""
        task = asyncio.create_task(self._host(self.service()).run(asyncio.Event()))
        try:
            await until(lambda: self.url or task.done())
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._host(self.generator).run(asyncio.Event()))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _host(self, actor: Actor) -> ActorHost:
        return ActorHost(actor, self.bus, self.store, name=actor.role, seed=1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS * 8, vocab_size=400)


@pytest.fixture
async def bus(request, tmp_path) -> AsyncIterator[Bus]:
    make = _nats if getattr(request, "param", "memory") == "nats" else _memory
    async with make(tmp_path) as bus:
        yield bus


@pytest.fixture
async def site(request, bus, tmp_path, tokenizer) -> AsyncIterator[Site]:
    settings = getattr(request, "param", {})
    site = Site(bus, DirectoryStore(tmp_path / "objects"), PenstockChat(tokenizer), **settings)
    async with site.running():
        yield site


def reward_of(end: RolloutFinished) -> float | None:
    return msgspec.structs.asdict(end)["reported_reward"]
