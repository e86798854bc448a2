"""A tinker server on a bus in memory, and its plain HTTP as the SDK speaks it."""

import asyncio
import contextlib
from functools import cache

import aiohttp
import numpy as np
import torch
from tests.outside_model import tokenizer_json
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host import ActorHost
from penstock.gateway.config import GatewayConfig
from penstock.gateway.keys import KeysFile, KeySpec, hash_key
from penstock.infra.stores.memory import MemoryStore
from penstock.infra.tinker.book import TYPES
from penstock.infra.tinker.executor import Base
from penstock.infra.tinker.protobuf import field, read_fields
from penstock.infra.tinker.replay import replay_calls
from penstock.infra.tinker.routes import build_app
from penstock.infra.tinker.server import TinkerServer
from penstock.infra.tinker.settings import TinkerConfig
from penstock.messages.base import Stream

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
KEYS = [
    KeySpec(key_id="a", key_hash=hash_key("psk-a"), storage_consent=True),
    KeySpec(key_id="b", key_hash=hash_key("psk-b"), storage_consent=True),
    KeySpec(key_id="silent", key_hash=hash_key("psk-silent")),
    KeySpec(key_id="slow", key_hash=hash_key("psk-slow"), storage_consent=True, rpm_limit=1),
]


@cache
def base(seed: int = 0) -> Base:
    config = PolicyConfig(
        vocab_size=544,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=0,
        num_experts_per_tok=0,
        intermediate_size=48,
        max_position_embeddings=256,
        mtp_num_heads=0,
    )
    policy = Policy(config, seed=seed).requires_grad_(False)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.bfloat16())
    return Base(policy, Tokenizer.from_json(tokenizer_json(), "tokenizer.json"), (513,), 128)


def tensor(values) -> bytes:
    array = np.array(values)
    kind = 2 if array.dtype.kind == "i" else 1
    data = array.astype("<i8" if kind == 2 else "<f4").tobytes()
    return field(1, data) + field(3, kind) + b"".join(field(4, n) for n in array.shape)


def datum(tokens, **inputs) -> bytes:
    found = field(1, field(1, field(1, np.array(tokens, "<i4").tobytes())))
    for name, values in inputs.items():
        found += field(2, field(1, name) + field(2, tensor(values)))
    return found


def plain(tokens=PROMPT) -> bytes:
    return datum(tokens[:-1], target_tokens=tokens[1:], weights=[1.0] * (len(tokens) - 1))


def forward_backward(model, seq, data, loss="cross_entropy", *, forward_only=False, **settings):
    found = field(1, model) + field(2, seq) + b"".join(field(3, one) for one in data)
    found += field(4, loss) + field(6, int(forward_only))
    for name, value in settings.items():
        found += field(7, field(1, name) + field(2, field(1, value)))
    return found


class World:
    """What survives a killed server."""

    def __init__(self, **settings) -> None:
        self.server = MemoryServer(seed=0, clock=SystemClock())
        self.store = MemoryStore()
        self.config = TinkerConfig(poll_s=5.0, **settings)

    def bus(self, name: str) -> MemoryBus:
        return MemoryBus(self.server, run_id="t", store=self.store, name=name)

    def stored(self) -> int:
        """Return how many events of the server are on the log."""
        return len(self.server.logs[Stream.TINKER].messages())

    @contextlib.asynccontextmanager
    async def serving(self):
        """Serve inside the block; its end is that of a killed process."""
        bus, url = self.bus("tinker"), asyncio.get_running_loop().create_future()
        actor = TinkerServer(
            self.config,
            GatewayConfig(port=0, drain_s_max=0.0),
            base(),
            ("tiny", "/models/tiny"),
            KeysFile(KEYS, ""),
            lambda: bus.follow(TYPES, stop_at_end=True),
            build_app,
            url.set_result,
        )
        host = ActorHost(actor, bus, self.store, name="tinker", seed=0)
        running = asyncio.create_task(host.run(asyncio.Event()))
        waiting = {running, url}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if running.done():
            running.result()
        try:
            async with aiohttp.ClientSession() as http:
                yield Client(http, url.result()), actor
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await actor._listener.stop()
            await actor._executor.close()
            await bus.close()

    async def replay(self, seed: int = 0):
        bus = self.bus("replay")
        try:
            return await replay_calls(bus, self.store, base(seed), self.config)
        finally:
            await bus.close()


class Client:
    """Sends bodies as the SDK does."""

    def __init__(self, http, url: str, key: str = "tml-psk-a") -> None:
        self.http, self.url, self.key = http, url, key

    def of(self, key: str) -> "Client":
        return Client(self.http, self.url, key)

    async def post(self, path: str, body) -> tuple[int, object]:
        is_bytes = isinstance(body, bytes)
        sent = {"data": body} if is_bytes else {"json": body}
        headers = {"X-API-Key": self.key}
        async with self.http.post(f"{self.url}/api/v1/{path}", headers=headers, **sent) as reply:
            if reply.content_type == "application/json":
                return reply.status, await reply.json()
            return reply.status, await reply.read()

    async def get(self, path: str) -> tuple[int, object]:
        headers = {"X-API-Key": self.key}
        async with self.http.get(f"{self.url}/api/v1/{path}", headers=headers) as reply:
            return reply.status, await reply.json()

    async def call(self, path: str, body):
        """Return the answer of a call, waited for."""
        status, found = await self.post(path, body)
        assert status == 200, found
        return await self.answer(found["request_id"])

    async def answer(self, request_id: str):
        for _ in range(30):
            status, found = await self.post("retrieve_future", {"request_id": request_id})
            assert status == 200, found
            if not (isinstance(found, dict) and found.get("type") == "try_again"):
                return found
        raise AssertionError(f"{request_id} was never answered")

    async def session(self) -> str:
        body = {"tags": [], "user_metadata": None, "sdk_version": "0", "type": "create_session"}
        status, found = await self.post("create_session", body)
        assert status == 200, found
        return found["session_id"]

    async def model(self, session: str, number: int = 0, *, rank: int = 4, seed: int = 1) -> str:
        lora = {"rank": rank, "seed": seed}
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny"}
        return (await self.call("create_model", body | {"lora_config": lora}))["model_id"]

    async def step(self, model: str, seq: int, rate: float = 1e-2):
        body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}}
        return await self.call("optim_step", body)

    async def sample(self, sampler: str, seq: int, **more):
        body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 2}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        body["sampling_params"] = {"max_tokens": 6} | more.pop("params", {})
        return sequences(await self.call("asample", body | more))


def outputs(reply: bytes) -> tuple[float, list[np.ndarray]]:
    """Return loss and logprobs of an answer, all sequences in one array."""
    loss, logprobs = 0.0, np.empty(0)
    for number, value in read_fields(reply, "reply"):
        if number == 3:
            loss = dict(read_fields(value, "metric"))[2]
        if number == 2:
            for inner, part in read_fields(value, "record"):
                entry = dict(read_fields(part, "entry")) if inner == 2 else {}
                if entry.get(1) == b"logprobs":
                    found = dict(read_fields(entry[2], "tensor"))
                    logprobs = np.frombuffer(found[1], "<f4")
    return loss, logprobs


def sequences(reply: bytes) -> list[tuple[list[int], list[float], bool]]:
    found = []
    for number, value in read_fields(reply, "reply"):
        if number == 1:
            parts = dict(read_fields(value, "sequence"))
            tokens = np.frombuffer(parts[2], "<i4").tolist()
            found.append((tokens, np.frombuffer(parts[3], "<f4").tolist(), parts[1] == 0))
    return found
