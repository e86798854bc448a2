"""Conformance of inference engines: what `Engine` promises, as checks that any engine must pass.

`make` starts an engine without weights, of `VOCAB_SIZE` tokens, whose grammars end with `STOP_ID`;
`weights(version)` gives a full set under HF's names as uint16 bfloat16 bits, different for every
version.
"""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from penstock.actors.generator.engine import (
    Engine,
    EngineNotReadyError,
    InvalidRequestError,
)
from penstock.kernels.delta import Patch
from penstock.kernels.digest import root_digest
from penstock.messages.errors import CorruptDataError, QueueFullError
from penstock.messages.rollout import StopReason
from penstock.messages.task import Sampling

Weights = dict[str, np.ndarray]
WeightsOf = Callable[[int], Weights]
CHECKS: list[Callable[[Engine, WeightsOf], Awaitable[None]]] = []
VOCAB_SIZE, STOP_ID = 320, 1
GREEDY = Sampling(temperature=0.0, num_tokens_max=24)
_NUM_TRIES = 20
_DEADLINE_S = 60.0


def check(function):
    CHECKS.append(function)
    return function


def brief(seed):
    return Sampling(seed=seed, num_tokens_max=40)


def prompt(seed, length=20):
    return np.random.default_rng(seed).integers(40, 200, length)


class Reply:
    """All chunks of one request, joined."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.token_ids = np.concatenate([chunk.token_ids for chunk in chunks]).tolist()
        self.logprobs = np.concatenate([chunk.behavior_logprobs for chunk in chunks]).tolist()
        self.versions = [c.policy_version for c in chunks for _ in c.token_ids]
        self.stop_reason = chunks[-1].stop_reason
        self.routes = chunks[-1].routed_experts
        self.num_cached = chunks[-1].num_cached_tokens


async def collect(engine, token_ids, sampling, **names):
    names.setdefault("request_id", f"r{len(token_ids)}-{sampling.seed}-{np.sum(token_ids)}")
    async with asyncio.timeout(_DEADLINE_S):
        return Reply([c async for c in engine.generate(token_ids, sampling, **names)])


async def load(engine, weights, version=0):
    await engine.begin_update()
    await engine.apply(weights)
    return await engine.commit(version, root_digest(weights))


def whole_blocks(engine, num_tokens):
    """Return how many of these tokens a prefix cache can hold."""
    block = engine.capabilities().cache_block
    return num_tokens // block * block


@check
async def refuses_before_weights(engine, weights_of):
    assert not engine.health().ready
    with pytest.raises(EngineNotReadyError):
        await collect(engine, prompt(0), GREEDY)


@check
async def streams_and_stops_at_length(engine, weights_of):
    await load(engine, weights_of(0))
    reply = await collect(engine, prompt(1), GREEDY)
    assert len(reply.token_ids) == len(reply.logprobs) == GREEDY.num_tokens_max
    assert len(reply.chunks) > 1
    assert [c.stop_reason for c in reply.chunks[:-1]] == [None] * (len(reply.chunks) - 1)
    assert reply.stop_reason is StopReason.LENGTH
    assert max(reply.logprobs) <= 0.0
    assert set(reply.versions) == {0}


@check
async def stops_at_a_stop_token(engine, weights_of):
    await load(engine, weights_of(0))
    free = await collect(engine, prompt(1), GREEDY)
    stop = free.token_ids[5]
    sampling = Sampling(temperature=0.0, num_tokens_max=24, stop_token_ids=(stop,))
    reply = await collect(engine, prompt(1), sampling)
    assert reply.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert reply.stop_reason is StopReason.STOP


@check
async def samples_do_not_depend_on_batch_mates(engine, weights_of):
    await load(engine, weights_of(0))
    alone = [await collect(engine, prompt(i), brief(seed=i)) for i in range(6)]
    await engine.reset_prefix_cache()
    tasks = [collect(engine, prompt(i), brief(seed=i)) for i in range(6)]
    for single, batched in zip(alone, await asyncio.gather(*tasks), strict=True):
        assert single.token_ids == batched.token_ids


@check
async def seeds_differ(engine, weights_of):
    await load(engine, weights_of(0))
    replies = [await collect(engine, prompt(0), brief(seed=seed)) for seed in range(3)]
    assert len({tuple(reply.token_ids) for reply in replies}) == 3


@check
async def prefix_reuse_changes_no_greedy_token(engine, weights_of):
    await load(engine, weights_of(0))
    first = await collect(engine, prompt(2), GREEDY, session_id="s", request_id="a")
    context = np.concatenate([prompt(2), first.token_ids, prompt(3, 7)])
    reused = await collect(engine, context, GREEDY, session_id="s", request_id="b")
    await engine.reset_prefix_cache()
    fresh = await collect(engine, context, GREEDY, session_id="t", request_id="c")
    assert reused.num_cached == whole_blocks(engine, len(prompt(2)) + len(first.token_ids) - 1)
    assert fresh.num_cached == 0
    assert reused.token_ids == fresh.token_ids
    np.testing.assert_allclose(reused.logprobs, fresh.logprobs, atol=1e-4)


@check
async def a_group_computes_its_prompt_once(engine, weights_of):
    await load(engine, weights_of(0))
    tasks = [
        collect(engine, prompt(4, 50), Sampling(seed=i), session_id=f"g{i}", request_id=f"g{i}")
        for i in range(4)
    ]
    replies = await asyncio.gather(*tasks)
    assert sorted(reply.num_cached for reply in replies) == [0] + [whole_blocks(engine, 49)] * 3


@check
async def routes_cover_the_input_positions(engine, weights_of):
    await load(engine, weights_of(0))
    first = await collect(engine, prompt(5), GREEDY, session_id="s", request_id="a")
    total = len(prompt(5)) + GREEDY.num_tokens_max
    assert first.routes.shape[0] == total - 1
    context = np.concatenate([prompt(5), first.token_ids, prompt(6, 5)])
    second = await collect(
        engine, context, GREEDY, session_id="s", request_id="b", routes_from=total - 1
    )
    joined = np.concatenate([first.routes, second.routes])
    await engine.reset_prefix_cache()
    whole = await collect(engine, context, GREEDY, session_id="t", request_id="c")
    np.testing.assert_array_equal(joined, whole.routes)


@check
async def abort_ends_requests(engine, weights_of):
    await load(engine, weights_of(0))
    await engine.pause()
    names = ["a", "b", "c"]
    tasks = [
        asyncio.create_task(collect(engine, prompt(i), GREEDY, request_id=name))
        for i, name in enumerate(names)
    ]
    await asyncio.sleep(0)
    await engine.abort("b")
    assert (await tasks[1]).stop_reason is StopReason.ABORTED
    await engine.abort()
    assert {(await task).stop_reason for task in tasks} == {StopReason.ABORTED}
    await engine.resume()
    assert engine.health().num_running == 0


@check
async def closing_the_stream_aborts(engine, weights_of):
    await load(engine, weights_of(0))
    num_before = engine.metrics().num_aborted
    for _ in range(_NUM_TRIES):  # On a busy machine a reply may be over before it is closed.
        stream = engine.generate(prompt(0), Sampling(num_tokens_max=100), request_id="a")
        await anext(stream)
        await stream.aclose()
        await engine.pause()  # the abort comes before it
        assert engine.health().num_running == 0
        await engine.resume()
        if engine.metrics().num_aborted > num_before:
            break
    assert engine.metrics().num_aborted == num_before + 1


@check
async def update_in_flight_tags_every_token(engine, weights_of):
    for _ in range(_NUM_TRIES):  # On a busy machine a reply may be over before the update.
        await load(engine, weights_of(0))
        sampling = Sampling(num_tokens_max=100, seed=3)
        chunks, stream = [], engine.generate(prompt(7), sampling, request_id="a")
        async with asyncio.timeout(_DEADLINE_S):
            chunks.append(await anext(stream))
            await engine.pause()
            pause_ms = await load(engine, weights_of(1), version=1)
            await engine.resume()
            chunks += [chunk async for chunk in stream]
        reply = Reply(chunks)
        assert pause_ms >= 0.0
        assert len(reply.token_ids) == 100
        assert reply.versions == sorted(reply.versions)
        if len(set(reply.versions)) > 1:
            break
    assert set(reply.versions) == {0, 1}
    assert engine.health().policy_version == 1


@check
async def a_patch_gives_the_same_weights_as_a_full_update(engine, weights_of):
    old, new = weights_of(0), weights_of(1)
    await load(engine, old)
    patches = {}
    for name, values in new.items():
        changed = np.flatnonzero(old[name] != values)
        patches[name] = Patch(changed, values.reshape(-1)[changed])
    await engine.begin_update()
    await engine.apply(patches)
    await engine.commit(1, root_digest(new))
    assert await engine.digest() == root_digest(new)
    patched = await collect(engine, prompt(8), GREEDY)
    await engine.reset_prefix_cache()
    await load(engine, new, version=2)
    assert (await collect(engine, prompt(8), GREEDY)).token_ids == patched.token_ids


@check
async def a_wrong_digest_changes_nothing(engine, weights_of):
    await load(engine, weights_of(0))
    await engine.begin_update()
    await engine.apply(weights_of(1))
    with pytest.raises(CorruptDataError):
        await engine.commit(1, root_digest(weights_of(0)))
    assert engine.health().policy_version == 0
    assert await engine.digest() == root_digest(weights_of(0))


@check
async def wrong_values_serve_nothing_until_a_commit_is_right(engine, weights_of):
    values = []
    for version in (0, 1):
        await load(engine, weights_of(version), version)
        values.append(engine.probe())
    assert len(values[0]) == len(values[1]) and values[0] != values[1]
    await engine.pause()
    waiting = asyncio.create_task(collect(engine, prompt(0), GREEDY, request_id="waiting"))
    await asyncio.sleep(0)
    await engine.begin_update()
    await engine.apply(weights_of(0))
    with pytest.raises(CorruptDataError, match="probe"):
        await engine.commit(2, root_digest(weights_of(0)), values[1])
    await engine.resume()
    assert not engine.health().ready
    for task in (waiting, collect(engine, prompt(0), GREEDY)):
        with pytest.raises(EngineNotReadyError):
            await task
    await engine.begin_update()
    await engine.apply(weights_of(0))
    await engine.commit(3, root_digest(weights_of(0)), values[0])
    assert set((await collect(engine, prompt(0), GREEDY)).versions) == {3}


@check
async def an_update_drops_prefixes_of_other_sessions(engine, weights_of):
    await load(engine, weights_of(0))
    await collect(engine, prompt(9), GREEDY, session_id="s", request_id="a")
    await load(engine, weights_of(1), version=1)
    other = await collect(engine, prompt(9), GREEDY, session_id="t", request_id="b")
    assert other.num_cached == 0


@check
async def bad_requests_are_refused(engine, weights_of):
    await load(engine, weights_of(0))
    longest = engine.capabilities().num_tokens_max
    for token_ids, sampling in (
        (np.array([], dtype=np.int32), GREEDY),
        (prompt(0, longest), GREEDY),
        (np.array([1, 10**6]), GREEDY),
        (np.array([-1]), GREEDY),
        (prompt(0), Sampling(temperature=-1.0)),
        (prompt(0), Sampling(top_p=0.0)),
        (prompt(0), Sampling(num_tokens_max=0)),
    ):
        with pytest.raises(InvalidRequestError):
            await collect(engine, token_ids, sampling)
    assert (await collect(engine, prompt(0), GREEDY)).stop_reason is StopReason.LENGTH


@check
async def bad_updates_are_refused(engine, weights_of):
    weights = weights_of(0)
    await load(engine, weights)
    name, values = next(iter(weights.items()))
    with pytest.raises(InvalidRequestError):
        await engine.apply(weights)
    await engine.begin_update()
    far = Patch(np.array([values.size]), values.reshape(-1)[:1])
    for patch in ({"no.such": values}, {name: values[:1]}, {name: far}):
        with pytest.raises(InvalidRequestError):
            await engine.apply(patch)


@check
async def the_queue_has_a_limit(engine, weights_of):
    await load(engine, weights_of(0))
    await engine.pause()
    limits = engine.capabilities()
    count = limits.num_running_max + limits.num_waiting_max
    tasks = [
        asyncio.create_task(collect(engine, prompt(0), GREEDY, request_id=f"q{i}"))
        for i in range(count)
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await collect(engine, prompt(0), GREEDY, request_id="one too many")
    await engine.resume()
    replies = await asyncio.gather(*tasks)
    assert {reply.stop_reason for reply in replies} == {StopReason.LENGTH}


@check
async def greedy_logprobs_are_those_of_the_distribution(engine, weights_of):
    await load(engine, weights_of(0))
    greedy = await collect(engine, prompt(11), GREEDY)
    narrow = Sampling(temperature=1.0, top_p=1e-6, num_tokens_max=24)
    nucleus = await collect(engine, prompt(11), narrow)
    assert nucleus.token_ids == greedy.token_ids
    assert max(map(abs, nucleus.logprobs)) < 1e-5
    assert max(greedy.logprobs) < -1e-3
