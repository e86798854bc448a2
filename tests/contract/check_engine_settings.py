"""Conformance of inference engines, the second part: what the settings of a request do.

`CHECKS` are those of both parts.
"""

import asyncio

import msgspec
import numpy as np
import pytest
from tests.contract.check_engine import (
    CHECKS,
    GREEDY,
    STOP_ID,
    VOCAB_SIZE,
    check,
    collect,
    load,
    prompt,
)

from penstock.actors.generator.engine import InvalidRequestError
from penstock.kernels.support import unpack_support
from penstock.messages.rollout import StopReason
from penstock.messages.task import Grammar, Sampling

__all__ = ["CHECKS"]

SHAPED = {
    "bias": {"logit_bias": {50: 30.0, 51: 30.0}, "top_k": 2},
    "top_k": {"top_k": 5, "presence_penalty": 1.5},
    "top_p": {"top_p": 0.5, "temperature": 0.7, "repetition_penalty": 1.3},
    "min_p": {"min_p": 0.2, "frequency_penalty": 0.5},
    "plain": {},
    "grammar": {"grammar": Grammar(text="start: <[60-69]>{4} <[70]>", prefix_ids=(41, 42))},
}


def allowed(reply, vocab_size=VOCAB_SIZE):
    bits = [chunk.support for chunk in reply.chunks if chunk.support is not None]
    return unpack_support(np.concatenate(bits), vocab_size) if bits else None


@check
async def each_request_has_its_own_settings(engine, weights_of):
    await load(engine, weights_of(0))
    stops = (STOP_ID,)
    samplings = {
        name: Sampling(seed=7, num_tokens_max=12, stop_token_ids=stops, **values)
        for name, values in SHAPED.items()
    }
    tasks = [
        collect(engine, prompt(12), sampling, request_id=name)
        for name, sampling in samplings.items()
    ]
    replies = dict(zip(samplings, await asyncio.gather(*tasks), strict=True))
    assert set(replies["bias"].token_ids) <= {50, 51}
    assert len(set(replies["top_k"].token_ids)) > 5, "penalties spread what is drawn"
    for name, reply in replies.items():
        rows = allowed(reply)
        assert (rows is not None) == samplings[name].is_truncated
        if rows is not None:
            assert rows[np.arange(len(reply.token_ids)), reply.token_ids].all()
    assert (allowed(replies["top_k"]).sum(1) == 5).all()
    said = replies["grammar"].token_ids
    assert said[:2] == [41, 42] and said[6:] == [70, STOP_ID]
    assert all(60 <= token < 70 for token in said[2:6])
    forced = np.concatenate([chunk.is_forced for chunk in replies["grammar"].chunks])
    assert forced.tolist() == [True] * 2 + [False] * 4 + [True] * 2
    alone = await collect(engine, prompt(12), samplings["top_p"], request_id="alone")
    assert alone.token_ids == replies["top_p"].token_ids


@check
async def a_turn_goes_on_where_another_engine_left_it(engine, weights_of):
    """Grammar, penalties, forced tokens and the seed's numbers are those of the whole turn."""
    await load(engine, weights_of(0))
    for name, values in SHAPED.items():
        sampling = Sampling(seed=3, num_tokens_max=8, stop_token_ids=(STOP_ID,), **values)
        whole = await collect(engine, prompt(13), sampling, request_id=name)
        for cut in (1, 3):
            left = msgspec.structs.replace(sampling, num_tokens_max=8 - cut)
            context = np.concatenate([prompt(13), whole.token_ids[:cut]])
            rest = await collect(engine, context, left, request_id=f"{name}-{cut}", num_resumed=cut)
            assert rest.token_ids == whole.token_ids[cut:], name


@check
async def the_likeliest_tokens_are_reported(engine, weights_of):
    await load(engine, weights_of(0))
    sampling = Sampling(seed=1, num_tokens_max=6, num_top_logprobs=4, temperature=0.8)
    reply = await collect(engine, prompt(14), sampling)
    ids = np.concatenate([chunk.top_ids for chunk in reply.chunks])
    logprobs = np.concatenate([chunk.top_logprobs for chunk in reply.chunks])
    assert ids.shape == logprobs.shape == (6, 4)
    assert (np.diff(logprobs, axis=1) <= 0).all()
    for token, logprob, row, values in zip(
        reply.token_ids, reply.logprobs, ids, logprobs, strict=True
    ):
        assert logprob <= values[0] + 1e-5
        if token in row:
            assert values[row.tolist().index(token)] == pytest.approx(logprob, abs=1e-4)


@check
async def settings_out_of_bounds_are_refused_by_name(engine, weights_of):
    await load(engine, weights_of(0))
    for values in (
        {"top_k": -1}, {"min_p": 1.5}, {"presence_penalty": 3.0}, {"frequency_penalty": -2.5},
        {"repetition_penalty": 0.0}, {"logit_bias": {10**6: 1.0}}, {"logit_bias": {5: 1e9}},
        {"num_top_logprobs": 21}, {"grammar": Grammar(text="start: nothing")},
        {"grammar": Grammar(text="start: <[60]>", prefix_ids=(10**6,))}, {"grammar": Grammar()},
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=next(iter(values))):
            await collect(engine, prompt(0), Sampling(**values))
    dead_end = Sampling(grammar=Grammar(text=f"start: <[60]> <[{VOCAB_SIZE + 40}]>"))
    with pytest.raises(InvalidRequestError, match=r"sampling\.grammar"):
        await collect(engine, prompt(0), dead_end)
    assert (await collect(engine, prompt(0), GREEDY)).stop_reason is StopReason.LENGTH
