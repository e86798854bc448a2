"""Every route by the real engine: forms are kept by a policy that knows nothing."""

import json

import aiohttp
import numpy as np
import pytest

from penstock.actors.generator.actor import Generator
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.sampler import GrammarMasks
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.config import PolicyConfig
from penstock.messages.feedback import InferenceRecorded
from penstock.messages.task import Purpose

from ..conftest import Site
from .test_gateway_engine import swap

ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
TOOL = {"name": "vote", "description": "Say yes or no.", "parameters": ANSWER}
USER = {"role": "user", "content": "Fix add."}
ASKED = {"model": "policy", "seed": 3}
CHAT = ASKED | {"messages": [USER], "max_tokens": 100}


@pytest.fixture
async def site(bus, tmp_path, tokenizer):
    config = PolicyConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=1,
        head_dim=16,
        moe_intermediate_size=32,
        max_position_embeddings=256,
    )
    masks = GrammarMasks(tokenizer, PenstockChat(tokenizer).stop_ids, tokenizer.vocab_size)
    engine = TorchEngine(config, EngineOptions(num_tokens_max=256), masks)
    engine.start()
    await swap(engine, config, 0)
    site = Site(bus, tmp_path, tokenizer, context_tokens_max=256)
    site.generator = Generator(engine, [Purpose.LIVE], "west", "west")
    async with site.running():
        yield site
    await engine.stop()


async def test_forms_are_kept_on_every_route(site):
    headers = {"Authorization": "Bearer psk-test"}
    async with aiohttp.ClientSession(site.url, headers=headers) as http:

        async def ask(path, body):
            reply = await http.post(path, json=body)
            assert reply.status == 200, await reply.text()
            return await reply.json()

        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
        chat = await ask("/v1/chat/completions", CHAT | {"response_format": schema})
        assert json.loads(chat["choices"][0]["message"]["content"])["answer"] in {"yes", "no"}
        tools = [{"type": "function", "function": TOOL}]
        named = {"type": "function", "function": {"name": "vote"}}
        for choice in ("required", named):
            chat = await ask("/v1/chat/completions", CHAT | {"tools": tools, "tool_choice": choice})
            (call,) = chat["choices"][0]["message"]["tool_calls"][:1]
            assert json.loads(call["function"]["arguments"])["answer"] in {"yes", "no"}
        both = CHAT | {"tools": tools, "response_format": schema}
        message = (await ask("/v1/chat/completions", both))["choices"][0]["message"]
        assert message.get("tool_calls") or json.loads(message["content"])["answer"] in {
            "yes",
            "no",
        }

        extras = {"n": 2, "logprobs": True, "top_logprobs": 3, "top_k": 5, "min_p": 0.01}
        extras |= {"presence_penalty": 0.5, "logit_bias": {"70": 4}, "max_tokens": 4}
        chat = await ask("/v1/chat/completions", CHAT | extras)
        for choice in chat["choices"]:
            for entry in choice["logprobs"]["content"]:
                assert len(entry["top_logprobs"]) == 3
                assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]

        response = await ask(
            "/v1/responses",
            {"model": "policy", "input": "x", "tool_choice": "required", "max_output_tokens": 100}
            | {"tools": [{"type": "function"} | TOOL]},
        )
        assert response["output"][0]["type"] == "function_call"
        text = {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}}
        response = await ask("/v1/responses", {"model": "policy", "input": "x", "text": text})
        assert json.loads(response["output"][0]["content"][0]["text"])["answer"] in {"yes", "no"}

        used = {"name": "vote", "input_schema": ANSWER}
        message = await ask(
            "/v1/messages",
            {"model": "policy", "messages": [USER], "max_tokens": 100, "tools": [used]}
            | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        )
        assert [block["input"]["answer"] in {"yes", "no"} for block in message["content"]] == [True]

        completion = await ask("/v1/completions", ASKED | {"prompt": "return ", "logprobs": 2})
        assert completion["usage"]["completion_tokens"] <= 16
        asked = {"token_ids": [70, 71], "sampling_params": {"max_tokens": 5, "ignore_eos": True}}
        generated = (await ask("/inference/v1/generate", asked))["choices"][0]["token_ids"]
        assert len(generated) == 5

        reply = await http.post(
            "/v1/chat/completions", json=CHAT | {"tools": tools, "tool_choice": {"type": "x"}}
        )
        assert reply.status == 400
    records = await site.events(InferenceRecorded)
    turn = await site.turn(records[-1])
    assert np.frombuffer(turn.token_ids.data, "<i4").tolist() == generated
    assert turn.sampling.num_tokens_max == 5
    assert len(records) == 11
