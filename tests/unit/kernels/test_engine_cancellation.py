"""A cancellation that comes together with what a call waits for is not lost."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.actors.generator import torch_engine
from penstock.actors.generator.engine import TokenChunk
from penstock.actors.generator.torch_engine import EngineWorker, TorchEngine
from penstock.actors.policy.config import PolicyConfig
from penstock.messages.errors import DeadlineError
from penstock.messages.task import Sampling

CONFIG = PolicyConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, head_dim=8)
PROMPT = np.arange(4)


@pytest.fixture
def engine(monkeypatch):
    """An engine that is ready and never steps."""
    engine = TorchEngine(CONFIG)
    monkeypatch.setattr(engine, "_check", lambda *_: None)
    return engine


async def collect(engine):
    return [chunk async for chunk in engine.generate(PROMPT, Sampling(), request_id="r")]


async def end_together(waiting: asyncio.Task, answer) -> None:
    """Give the answer, let whoever awaits it directly see it, then cancel."""
    await asyncio.sleep(0.01)
    answer()
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_request_is_cancelled_though_its_chunk_comes(engine):
    chunk = TokenChunk(
        token_ids=np.zeros(1, np.int32), behavior_logprobs=np.zeros(1, np.float32), policy_version=0
    )
    reading = asyncio.create_task(collect(engine))
    await end_together(reading, lambda: engine._deliver([(SimpleNamespace(request_id="r"), chunk)]))


async def test_a_command_is_cancelled_though_its_result_comes():
    commands = []
    worker = EngineWorker(SimpleNamespace(), lambda outputs: None)
    worker._thread = SimpleNamespace(is_alive=lambda: True)
    worker.post = commands.append
    calling = asyncio.create_task(worker.call(lambda: "done"))
    await asyncio.sleep(0)
    await end_together(calling, commands[0])


async def test_a_request_without_chunks_ends_with_its_name(engine, monkeypatch):
    monkeypatch.setattr(torch_engine, "_REQUEST_S", 0.01)
    with pytest.raises(DeadlineError, match="request r: no chunk within"):
        await collect(engine)
