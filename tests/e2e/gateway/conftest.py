"""A gateway on a real bus, with a generator that replies as it is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.sealed import MASTER_KEY
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.monitor.actor import Monitor
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.summaries import SummaryConfig
from penstock.actors.policy.tokenizer import Tokenizer, train_tokenizer
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.vault import Vault
from penstock.gateway.actor import Gateway
from penstock.gateway.config import GatewayConfig
from penstock.gateway.identity import Pseudonyms
from penstock.gateway.keys import KeySpec, hash_key
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.base import Array, Event, Message
from penstock.messages.bus import Bus, Serve
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded
from penstock.messages.generation import AbortGeneration, Generate, ReplicaReported, TokensSampled
from penstock.messages.reading.sealed import FeedbackContent
from penstock.messages.reading.trajectories import open_live_turn
from penstock.messages.rollout import StopReason, Turn
from penstock.messages.rpc import Ack
from penstock.messages.signals.defaults import DEFAULT_SIGNALS
from penstock.messages.task import Purpose

SECRET = "psk-test"
OPERATOR = "psk-operator"
KEYS = (
    KeySpec(key_id="user", key_hash=hash_key(SECRET), storage_consent=True, training_consent=True),
    KeySpec(key_id="operator", key_hash=hash_key(OPERATOR), operator=True),
    KeySpec(key_id="mate", key_hash=hash_key("psk-mate"), tenant="user"),
    KeySpec(key_id="other", key_hash=hash_key("psk-other"), storage_consent=True),
    KeySpec(key_id="private", key_hash=hash_key("psk-private")),
    KeySpec(
        key_id="explorer",
        key_hash=hash_key("psk-explorer"),
        storage_consent=True,
        training_consent=True,
        explores=True,
    ),
    KeySpec(key_id="slow", key_hash=hash_key("psk-slow"), rpm_limit=2),
    KeySpec(key_id="single", key_hash=hash_key("psk-single"), max_parallel_requests=1),
)
TEXTS = ["def add(a, b):\n    return a + b\n", "The café is open. Look, edit, run, finish.\n"]


class Reply(msgspec.Struct, kw_only=True):
    """What the scripted generator does with one request."""

    token_ids: list[int] = []
    num_chunk: int = 3
    fail_after: int = -1
    """Chunks before it fails; -1 for never."""
    pause_after: int = -1
    """Chunks before it waits for `resume`; -1 for never."""
    policy_version: int = 7


class ScriptedGenerator(Actor):
    """Answers `generate.live` from a list; what it was asked is on record."""

    role = "generator"
    tick_s = 0.05

    def __init__(self, replica: str = "west") -> None:
        self.replica = replica
        self.policy_version = 7
        """-1: says nothing of itself."""
        self.replies: list[Reply] = []
        self.asked: list[Generate] = []
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.resume = asyncio.Event()

    def services(self) -> Mapping[str, Serve]:
        return {
            f"generate.live.{self.replica}": self._generate,
            f"abort.{self.replica}": self._abort,
        }

    async def on_tick(self, ctx: Context) -> Effects:
        return (reported(self.policy_version, self.replica),) if self.policy_version >= 0 else ()

    async def _abort(self, message: Message) -> AsyncIterator[Message]:
        assert isinstance(message, AbortGeneration)
        self.aborted.append(message.request_id)
        yield Ack()

    async def _generate(self, message: Message) -> AsyncIterator[Message]:
        assert isinstance(message, Generate)
        self.asked.append(message)
        reply = self.replies.pop(0)
        await self.gate.wait()
        ids = reply.token_ids[: message.sampling.num_tokens_max]
        chunks = [ids[i : i + reply.num_chunk] for i in range(0, len(ids), reply.num_chunk)]
        for index, chunk in enumerate(chunks):
            if index == reply.fail_after:
                raise RuntimeError("the machine is gone")
            if index == reply.pause_after:
                await self.resume.wait()
            is_last = index == len(chunks) - 1
            yield _chunk(message, chunk, reply, self._stop(message, ids) if is_last else None)

    @staticmethod
    def _stop(message: Generate, ids: list[int]) -> StopReason:
        ended = ids[-1] in message.sampling.stop_token_ids
        return StopReason.STOP if ended else StopReason.LENGTH


def _chunk(
    message: Generate, ids: list[int], reply: Reply, stop: StopReason | None
) -> TokensSampled:
    logprobs = np.asarray([-0.25] * len(ids), "<f4")
    return TokensSampled(
        request_id=message.request_id,
        token_ids=Array(dtype="int32", shape=(len(ids),), data=np.asarray(ids, "<i4").tobytes()),
        behavior_logprobs=Array(dtype="float32", shape=(len(ids),), data=logprobs.tobytes()),
        policy_version=reply.policy_version,
        stop_reason=stop,
        route_segments=[b"sealed"] if stop else [],
        replica="west",
    )


class Site:
    """A running gateway and what stands around it."""

    def __init__(
        self,
        bus: Bus,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        summary: SummaryConfig | None = None,
        **settings: float | str,
    ) -> None:
        self.bus = bus
        self.tokenizer = tokenizer
        self.chat = PenstockChat(tokenizer)
        self.generator = ScriptedGenerator()
        config = GatewayConfig(port=0, retry_s=0.01, num_attempts_max=3, idle_s_max=30.0)
        config = msgspec.structs.replace(config, **settings)
        self.url = self.page_url = ""
        self.gateway = Gateway(
            config,
            self.chat,
            KEYS,
            secret=MASTER_KEY,
            spool=folder / "spool",
            signals=DEFAULT_SIGNALS,
            summary=summary,
            on_listening=self._on_listening,
            on_page=self._on_page,
        )
        self.store = DirectoryStore(folder / "objects")
        self._gateway_stop = asyncio.Event()
        self._gateway_run: asyncio.Task[None] | None = None

    def _on_listening(self, url: str) -> None:
        self.url = url

    def _on_page(self, link: str) -> None:
        self.page_url = link

    def will_reply(self, token_ids: list[int], **options: int) -> None:
        self.generator.replies.append(Reply(token_ids=token_ids, **options))

    async def turn(self, record: InferenceRecorded) -> Turn:
        """Open what a record holds."""
        return await open_live_turn(self.store, self.vault().open, record.turn, record.request_id)

    async def feedback_content(self, event: FeedbackReceived) -> FeedbackContent:
        """Open what a user wrote with a piece of feedback."""
        data = await self.vault().open(event.content, event.key())
        return msgspec.msgpack.decode(data, type=FeedbackContent)

    def vault(self) -> Vault:
        """Return another process's vault."""
        return Vault(self.store, MASTER_KEY)

    async def events(self, kind: type[Event]) -> list[Event]:
        return [d.event async for d in self.bus.follow([kind], stop_at_end=True)]

    @contextlib.asynccontextmanager
    async def running(self, *actors: Actor) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for actor in (self.generator, *actors):
                group.create_task(self._host(actor).run(stop))
            self._gateway_run = group.create_task(self._host(self.gateway).run(self._gateway_stop))
            await until(lambda: self.url)
            try:
                yield
            finally:
                stop.set()
                self._gateway_stop.set()

    async def stop_gateway(self) -> None:
        self._gateway_stop.set()
        await self._gateway_run

    def _host(self, actor: Actor) -> ActorHost:
        return ActorHost(actor, self.bus, self.store, name=actor.role, seed=1)


def stored_id(feedback_id: str) -> str:
    """Return the id that the log has of feedback of tenant `user`."""
    return Pseudonyms(MASTER_KEY).feedback(KEYS[0], feedback_id)


async def until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


async def eventually(site: Site, kind: type[Event], deadline_s: float = 20.0) -> list[Event]:
    """Return the stored events of a type as soon as there is one."""
    async with asyncio.timeout(deadline_s):
        while not (found := await site.events(kind)):
            await asyncio.sleep(0.02)
    return found


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS * 8, vocab_size=400)


@contextlib.asynccontextmanager
async def _nats(folder: Path) -> AsyncIterator[Bus]:
    server = EmbeddedServer(store_dir=folder / "events")
    await server.start()
    store = DirectoryStore(folder / "objects")
    bus = await NatsBus.connect(server.url, run_id="r1", store=store, name="test")
    try:
        await bus.provision()
        yield bus
    finally:
        await bus.close()
        await server.stop()


@contextlib.asynccontextmanager
async def _memory(folder: Path) -> AsyncIterator[Bus]:
    server = MemoryServer(seed=1, clock=SystemClock())
    bus = MemoryBus(server, run_id="r1", store=DirectoryStore(folder / "objects"), name="test")
    yield bus
    await bus.close()


@pytest.fixture
async def bus(request, tmp_path) -> AsyncIterator[Bus]:
    """In memory; a test that asks for it by `indirect` gets a real nats-server."""
    make = _nats if getattr(request, "param", "memory") == "nats" else _memory
    async with make(tmp_path) as bus:
        yield bus


@pytest.fixture
async def site(bus, tmp_path, tokenizer) -> AsyncIterator[Site]:
    site = Site(bus, tmp_path, tokenizer)
    async with site.running(Monitor(), FeedbackJoiner(JoinConfig(reward_wait_s=0.0))):
        yield site


def reported(policy_version: int, replica: str = "west") -> ReplicaReported:
    return ReplicaReported(
        region="west", replica=replica, started_at=0.0, serves=[Purpose.LIVE],
        policy_version=policy_version, num_running_max=64,
    )  # fmt: skip
