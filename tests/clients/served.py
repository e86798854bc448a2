"""A gateway and an engine over a model's folder, with a log that can be read."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from penstock.actors.generator.actor import Generator
from penstock.actors.generator.core import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.checkpoint import as_numpy, load_checkpoint, publishable_state
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.actors.runtime.host import ActorHost
from penstock.gateway.actor import Gateway
from penstock.gateway.config import GatewayConfig
from penstock.gateway.keys import KeySpec, hash_key
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.base import Event
from penstock.messages.bus import Bus
from penstock.messages.task import Purpose

from .checkpoint import CONTEXT_TOKENS

KEY, SLOW_KEY = "psk-clients", "psk-slow"
REPLY_TOKENS = 1024
_CONSENT = {"storage_consent": True, "training_consent": True}
_KEYS = (
    KeySpec(key_id="clients", key_hash=hash_key(KEY), tpm_limit=100_000_000, **_CONSENT),
    KeySpec(key_id="slow", key_hash=hash_key(SLOW_KEY), rpm_limit=2, **_CONSENT),
)


class Service:
    """Address and log of what is served."""

    def __init__(self, url: str, bus: Bus) -> None:
        self.url = url
        self._bus = bus

    async def events(self, kind: type[Event]) -> Sequence[Event]:
        """Return all events of a type so far."""
        return [d.event async for d in self._bus.follow([kind], stop_at_end=True)]


@contextlib.asynccontextmanager
async def serving(model: Path, folder: Path) -> AsyncIterator[Service]:
    """Serve a model's folder."""
    server = EmbeddedServer(store_dir=folder / "events")
    await server.start()
    store = DirectoryStore(folder / "objects")
    bus = await NatsBus.connect(server.url, run_id="r1", store=store, name="clients")
    stop, urls = asyncio.Event(), asyncio.Queue()
    try:
        await bus.provision()
        engine = await _engine(model)
        tokenizer = Tokenizer.from_json((model / "tokenizer.json").read_text(), "tokenizer.json")
        config = GatewayConfig(
            port=0, context_tokens_max=CONTEXT_TOKENS, reply_tokens_max=REPLY_TOKENS
        )
        chat = open_chat("renderers:qwen3", tokenizer)
        gateway = Gateway(config, chat, _KEYS, secret=bytes(32), on_listening=urls.put_nowait)
        generator = Generator(engine, [Purpose.LIVE], "local", "local")
        async with asyncio.TaskGroup() as group:
            for actor in (generator, gateway):
                host = ActorHost(actor, bus, store, name=actor.role, seed=1)
                group.create_task(host.run(stop))
            try:
                yield Service(await asyncio.wait_for(urls.get(), 30.0), bus)
            finally:
                stop.set()
        await engine.stop()
    finally:
        await bus.close()
        await server.stop()


async def _engine(model: Path) -> TorchEngine:
    policy = load_checkpoint(model)
    options = EngineOptions(num_running_max=4, num_parked_max=4, num_tokens_max=CONTEXT_TOKENS)
    engine = TorchEngine(policy.config, options)
    engine.start()
    await engine.begin_update()
    await engine.apply({name: as_numpy(t) for name, t in publishable_state(policy).items()})
    await engine.commit(0)
    return engine
