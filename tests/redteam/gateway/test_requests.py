"""Requests that were made to end the engine, and with it the run: each ends itself alone."""

import asyncio
import contextlib
import math

import numpy as np
import pytest
import torch
from tests.contract.check_engine import GREEDY, collect, load, prompt
from tests.contract.test_engine_conformance import CONFIG, OPTIONS, weights_of

from penstock.actors.generator import core
from penstock.actors.generator.engine import (
    ContextLengthError,
    EngineNotReadyError,
    InvalidRequestError,
    RequestFailedError,
)
from penstock.actors.generator.sampler import SamplingBatch, sample
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.generation import Generation
from penstock.gateway.routes.chat import read_chat
from penstock.messages.control import ItemCharged
from penstock.messages.errors import RemoteCallError
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.task import Sampling

TINY = float(np.finfo(np.float32).tiny)


@pytest.fixture(params=["native", "torch"])
async def engine(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(core.NativeDecoder, "load", lambda *_: None)
    engine = TorchEngine(CONFIG, OPTIONS)
    if request.param not in engine.capabilities().name:
        pytest.skip("no C compiler")
    engine.start()
    await load(engine, weights_of(0))
    yield engine
    await engine.stop()


async def serves(engine):
    """Whether the engine still gives what it gave before the attack."""
    reply = await collect(engine, prompt(9), GREEDY, request_id="after")
    return len(reply.token_ids) == GREEDY.num_tokens_max


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 1e-300),
        ("top_p", 1e-46),
        ("top_p", math.nan),
        ("temperature", 1e-300),
        ("temperature", 1e-40),
        ("temperature", math.inf),
        ("temperature", math.nan),
    ],
)
async def test_values_that_float32_cannot_hold_are_refused_by_name(engine, field, value):
    with pytest.raises(InvalidRequestError, match=field):
        await collect(engine, prompt(1), Sampling(**{field: value}))
    assert await serves(engine)


@pytest.mark.parametrize("temperature", [1e-46, TINY, math.inf, math.nan, 1.0])
def test_no_value_makes_the_sampler_leave_the_vocabulary(temperature):
    batch = SamplingBatch([temperature] * 3, [0.0, 0.5, 1.0 - 2**-53])
    logits = torch.tensor([[3.0, -2.0, 0.5], [0.0, 0.0, 0.0], [-math.inf, 5.0, 88.0]])
    tokens, logprobs = sample(logits, batch)
    assert all(0 <= token < 3 for token in tokens)
    assert all(logprob <= 0.0 for logprob in logprobs)


async def test_a_reply_of_2_to_40_tokens_takes_no_memory_in_advance(engine):
    sampling = Sampling(num_tokens_max=2**40, temperature=0.0)
    reply = await collect(engine, prompt(1), sampling)
    assert len(reply.token_ids) == OPTIONS.num_tokens_max - len(prompt(1))


async def test_a_row_of_logits_that_is_no_number_ends_its_request_alone(engine, monkeypatch):
    """Overflowing activations of one context are not the others' trouble."""
    step = engine._core.decoder.step

    def poisoned(model, batch):
        logits = step(model, batch)
        rows, _ = batch.places()
        for output, index in enumerate(batch.output_rows):
            if engine._core.cache.tokens[rows[index], 0] == 7:
                logits[output, 3] = math.nan
        return logits

    monkeypatch.setattr(engine._core.decoder, "step", poisoned)
    bad = np.concatenate([[7], prompt(2)])
    good = [collect(engine, prompt(i), GREEDY, request_id=f"g{i}") for i in range(3)]
    *replies, failure = await asyncio.gather(
        *good, collect(engine, bad, GREEDY, request_id="bad"), return_exceptions=True
    )
    assert isinstance(failure, RequestFailedError)
    assert "logits" in str(failure)
    assert [len(reply.token_ids) for reply in replies] == [GREEDY.num_tokens_max] * 3
    assert await serves(engine)


async def test_a_context_that_raises_in_a_step_ends_its_request_alone(engine, monkeypatch):
    """The step fails for the whole batch: who did it is found by stepping one at a time."""
    expected = await collect(engine, prompt(1), GREEDY, request_id="alone")
    await engine.reset_prefix_cache()
    step = engine._core.decoder.step

    def raising(model, batch):
        if 7 in batch.token_ids:
            raise IndexError("a token that the kernel cannot take")
        return step(model, batch)

    monkeypatch.setattr(engine._core.decoder, "step", raising)
    bad = np.concatenate([prompt(2), [7]])
    good = [collect(engine, prompt(i), GREEDY, request_id=f"g{i}") for i in (1, 3, 4)]
    *replies, failure = await asyncio.gather(
        *good, collect(engine, bad, GREEDY, request_id="bad"), return_exceptions=True
    )
    assert isinstance(failure, RequestFailedError)
    assert "cannot take" in str(failure)
    assert replies[0].token_ids == expected.token_ids
    assert [len(reply.token_ids) for reply in replies] == [GREEDY.num_tokens_max] * 3
    assert await serves(engine)


async def test_an_engine_that_fails_for_everyone_says_so_and_ends(engine, monkeypatch):
    def broken(model, batch):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine._core.decoder, "step", broken)
    for number in range(core.FAILURES_IN_A_ROW_MAX):
        with pytest.raises((RequestFailedError, EngineNotReadyError)):
            await collect(engine, prompt(number), GREEDY, request_id=str(number))
    async with asyncio.timeout(10):
        while not engine.health().error:
            await asyncio.sleep(0.01)
    assert "device is gone" in engine.health().error


async def test_a_context_beyond_the_engine_is_refused_with_the_numbers(engine):
    with pytest.raises(ContextLengthError, match=r"201.*199") as caught:
        await collect(engine, prompt(1, 201), GREEDY)
    assert (caught.value.num_tokens, caught.value.num_tokens_max) == (201, 199)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("top_p", "1e-300"),
        ("top_p", "1e-7"),
        ("temperature", "1e-300"),
        ("temperature", "1e-4"),
        ("top_p", "1e999"),
        ("temperature", "1e999"),
    ],
)
def test_the_gateway_refuses_tiny_values_by_name(field, text):
    body = f'{{"model": "policy", "messages": [{{"role": "user"}}], "{field}": {text}}}'
    with pytest.raises(ApiError) as caught:
        read_chat(body.encode())
    assert caught.value.status == 400
    assert field in str(caught.value) or "out of range" in str(caught.value)


class FailingGenerators:
    """A context and its replicas: each answers with the same error."""

    def __init__(self, kind, charged=None):
        self.kind, self.charged, self.num_asked = kind, charged, 0

    async def last(self, event_type, key):
        assert (event_type, key) == (ItemCharged, "generator.Generate.r1.1")
        return self.charged

    async def sleep(self, duration_s):
        pass

    @contextlib.asynccontextmanager
    async def waiting(self, target, reason, *, deadline_s, policy_version=-1):
        yield

    async def chosen(self, session, purpose, channel, asked):
        return "generator-west"

    @contextlib.contextmanager
    def using(self, replica):
        yield asyncio.get_running_loop().create_future()

    async def stream_request(self, service, message, *, idle_s, reason="", is_served=True):
        self.num_asked += 1
        raise RemoteCallError(self.kind, "no more")
        yield


@pytest.mark.parametrize(
    ("kind", "status", "num_asked"),
    [
        (RemoteErrorKind.CHARGED, 500, 1),
        (RemoteErrorKind.TOO_LONG, 400, 1),
        (RemoteErrorKind.INVALID, 400, 1),
        (RemoteErrorKind.BUSY, 503, 4),
    ],
)
async def test_what_failed_at_a_request_does_not_get_it_again(kind, status, num_asked):
    ctx = FailingGenerators(kind)
    generation = Generation("r1", "s1", [1, 2, 3], Sampling())
    with pytest.raises(ApiError) as caught:
        async for _ in generation.stream(ctx, GatewayConfig(num_attempts_max=4), ctx):
            pass
    assert (caught.value.status, ctx.num_asked) == (status, num_asked)


async def test_a_request_under_which_a_generator_died_is_not_tried_again():
    """Whether it is the cause or not: the error reaches the client, which decides."""
    charged = ItemCharged(item="x", number=1, cause="ended by signal 11", is_proven=False)
    ctx = FailingGenerators(RemoteErrorKind.BUSY, charged)
    generation = Generation("r1", "s1", [1, 2, 3], Sampling())
    with pytest.raises(ApiError, match="signal 11") as caught:
        async for _ in generation.stream(ctx, GatewayConfig(num_attempts_max=4), ctx):
            pass
    assert (caught.value.status, ctx.num_asked) == (500, 1)
