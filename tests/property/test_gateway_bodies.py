"""Any body of any route is answered or refused with a typed error in the route's own form."""

import asyncio
import copy
import json
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.gateway.app import ROUTES
from penstock.gateway.config import GatewayConfig
from penstock.gateway.conversation import Opening
from penstock.gateway.errors import ApiError, error_body
from penstock.gateway.exchange.choice import Choice
from penstock.gateway.exchange.plan import Planner, TokenCharge
from penstock.gateway.routes.messages import read_count
from penstock.messages.rollout import StopReason, ToolCall

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
}
FUNCTION = {"name": "look", "description": "x", "parameters": PARAMETERS, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
PART = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "c", "name": "look"}
COMMON = {"model": "policy", "temperature": 0.5, "top_p": 0.9, "stream": True}
SEEDS = {
    "/v1/chat/completions": COMMON
    | {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [PART]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "stop": ["x"],
        "n": 2,
        "seed": 1,
        "max_tokens": 5,
        "logprobs": True,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        "metadata": {"user_id": "u"},
        "parallel_tool_calls": False,
    },
    "/v1/responses": COMMON
    | {
        "instructions": "x",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"type": "reasoning", "summary": []},
        ],
        "tools": [{"type": "function"} | FUNCTION, {"type": "custom", "name": "patch"}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
        "store": False,
    },
    "/v1/messages": COMMON
    | {
        "max_tokens": 5,
        "system": [PART],
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [PART, {"type": "tool_use", "id": "c", "name": "look"}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        ],
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    },
    "/v1/completions": COMMON | {"prompt": "x", "n": 2, "stop": "x", "logprobs": 0, "seed": 1},
    "/inference/v1/generate": {
        "token_ids": [1, 2],
        "sampling_params": {"n": 2, "max_tokens": 5, "stop": ["x"], "logprobs": 0},
        "stream": True,
    },
}
READERS = {path: read for path, (read, _) in ROUTES.items()}
READERS["/v1/messages/count_tokens"] = read_count
SEEDS["/v1/messages/count_tokens"] = SEEDS["/v1/messages"]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 2**31, 2**63])
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "required", "look", "json_schema", "\ud800", "tool_use", "user"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "name", "text"]) | st.text(max_size=4), inner)
    ),
    max_leaves=6,
)


@cache
def chat() -> PenstockChat:
    return PenstockChat(train_tokenizer(["def add(a, b):\n    return a + b\n"] * 4, vocab_size=330))


def places(value, path=()):
    """Yield the path of every node below the root."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for name, child in children:
        yield (*path, name)
        if isinstance(child, dict | list):
            yield from places(child, (*path, name))


@st.composite
def bodies(draw, seed):
    """Return a good body, changed in a few places."""
    body = copy.deepcopy(seed)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(body))
        if not found:
            break
        *path, name = draw(st.sampled_from(found))
        holder = body
        for step in path:
            holder = holder[step]
        what = draw(st.sampled_from(["put", "put", "put", "drop", "double", "nest"]))
        if what == "put":
            holder[name] = draw(values)
        elif what == "drop":
            del holder[name]
        elif what == "nest":
            for _ in range(draw(st.sampled_from([1, 70, 300]))):
                holder[name] = [holder[name]]
        elif isinstance(holder, list):
            holder.insert(name, copy.deepcopy(holder[name]))
    return body


def answered(path: str, data: bytes) -> None:
    """Do to a body all that the gateway does, with a reply that calls and says all there is."""
    asked = READERS[path](data)
    planner = Planner(GatewayConfig(), chat())
    planner.check_size(asked.conversation, TokenCharge())
    planned = planner.plan(
        asked.conversation, key_id="k", session=(("", "u"), "s"), seed=1, charge=TokenCharge()
    )
    plan = asyncio.run(planned)
    request = asked.conversation
    writer = asked.writer(Opening("r1", 0.0, request, plan.context_ids, chat().tokenizer))
    calls = [ToolCall(name=name, arguments={"n": "[1"}) for name in list(request.offered)[:2]]
    ids = chat().render_turn("x é \N{GRINNING FACE}", calls)
    replies = []
    events = list(writer.begin())
    for index in range(request.num_choices):
        choice = Choice(index, f"r1-{index}", request, plan, chat())
        sampled = choice.generation.sampled
        sampled.token_ids, sampled.logprobs = ids, [-1.0] * len(ids)
        sampled.stop_reason = StopReason.STOP
        events += [*writer.deltas(choice, choice.push(ids)), *writer.deltas(choice, choice.close())]
        choice.remember(planner.memory)
        replies.append(choice)
    events += writer.end(replies)
    for event in events:
        text = event.decode().rpartition("data: ")[2]
        assert text == "[DONE]\n\n" or json.loads(text)
    again = asked.writer(Opening("r1", 0.0, request, plan.context_ids, chat().tokenizer))
    assert json.loads(again.whole(replies))


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(sorted(SEEDS)))
def test_a_changed_body_is_answered_or_refused_by_a_typed_error(data, path):
    body = data.draw(bodies(SEEDS[path]))
    try:
        answered(path, json.dumps(body).encode())
    except ApiError as error:
        assert error.status == 400
        assert json.loads(error_body(error, path))["error"]["message"]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=64), st.sampled_from(sorted(SEEDS)))
def test_bytes_that_are_no_body_are_refused(data, path):
    try:
        answered(path, data)
    except ApiError as error:
        assert error.status == 400


def test_every_seed_is_answered():
    for path, body in SEEDS.items():
        answered(path, json.dumps(body).encode())
