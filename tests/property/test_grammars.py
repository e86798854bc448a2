"""Whatever a policy would say, a masked turn is what its grammar promises."""

import asyncio
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.outside_model import qwen_tokenizer

from penstock.actors.generator.engine import InvalidRequestError
from penstock.actors.generator.sampler import GrammarMasks
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatMessage, OfferedTools, ParsedTurn, Role
from penstock.actors.policy.chat.grammars import grammar_for_calls, grammar_for_schema
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.chat.renderers import RenderersChat
from penstock.actors.policy.chat.schemas import GrammarError
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.kernels.support import unpack_support

EDIT = {
    "name": "edit_file",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "minLength": 1, "maxLength": 12},
            "old": {"type": "string", "maxLength": 8},
            "mode": {"enum": ["all", "first"]},
        },
        "required": ["path", "mode"],
        "additionalProperties": False,
    },
}
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
        },
        "required": ["days"],
        "$defs": {"place": {"type": "object", "properties": {"at": {"type": "boolean"}},
                            "required": ["at"], "additionalProperties": False}},
    },
}  # fmt: skip
TOOLS = [EDIT, WEATHER]


@cache
def chat():
    texts = [path.read_text() for path in sorted(Path("messages").glob("*.py"))[:4]]
    return PenstockChat(train_tokenizer(texts, 600))


@cache
def qwen():
    return open_chat("renderers:qwen3", qwen_tokenizer())


@cache
def masks_of(speaker):
    vocab_size = speaker.tokenizer.vocab_size + 3  # A policy may have more ids than words.
    return GrammarMasks(speaker.tokenizer, speaker.stop_ids, vocab_size)


def turn(grammar, seed, chat_format=None, num_tokens_max=4000):
    """What an undecided policy says: any allowed token; after a while, the shortest way out."""
    speaker = chat_format or chat()
    rng = np.random.default_rng(seed)
    matcher = asyncio.run(masks_of(speaker).open(grammar.text))
    vocab_size, ids = speaker.tokenizer.vocab_size, list(grammar.prefix_ids)
    for index in range(num_tokens_max):
        allowed = np.flatnonzero(unpack_support(matcher.allowed(), vocab_size))
        is_special = [speaker.tokenizer.special_of(int(one)) is not None for one in allowed]
        ways_out = allowed[is_special] if index > 30 else allowed[:0]
        token = int(rng.choice(ways_out if ways_out.size else allowed))
        ids.append(token)
        if token in speaker.stop_ids:
            return ids
        matcher.accept(token)
    pytest.fail("no end")


def parsed(ids):
    found = chat().parse_turn(ids)
    assert isinstance(found, ParsedTurn), found
    return found


def check_call(call):
    if call.name == "edit_file":
        assert {"path", "mode"} <= call.arguments.keys() <= {"path", "old", "mode"}
        assert call.arguments["mode"] in {"all", "first"}
        assert 1 <= len(call.arguments["path"]) <= 12
    else:
        assert call.name == "get_weather"
        assert 1 <= json.loads(call.arguments["days"]) <= 14
        for place in json.loads(call.arguments.get("places", "[]")):
            assert isinstance(place["at"], bool)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), choice=st.sampled_from(["auto", "required"]),
       parallel=st.booleans())  # fmt: skip
def test_calls_follow_the_tools_schemas(seed, choice, parallel):
    found = parsed(turn(grammar_for_calls(chat(), TOOLS, choice, parallel=parallel), seed))
    for call in found.calls:
        check_call(call)
    if choice == "required":
        assert found.calls and not found.text
    if not parallel:
        assert len(found.calls) <= 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["edit_file", "get_weather"]))
def test_a_named_tool_is_called_once_its_opening_forced(seed, name):
    grammar = grammar_for_calls(chat(), TOOLS, name)
    assert chat().tokenizer.decode(grammar.prefix_ids).startswith('<call name="')
    [call] = parsed(turn(grammar, seed)).calls
    assert call.name == name
    check_call(call)


DAYS = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 14},
                       "at": {"enum": ["x", "y"]}},
        "required": ["days", "at"],
        "additionalProperties": False,
    },
}  # fmt: skip


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32), choice=st.sampled_from(["required", "get_weather"]))
def test_formats_of_published_models_write_calls_as_json(seed, choice):
    grammar = grammar_for_calls(qwen(), [DAYS], choice, parallel=False)
    ids = turn(grammar, seed, qwen())
    prompt = qwen().render_prompt([ChatMessage(role=Role.USER, content="?")], OfferedTools())
    found = qwen().parse_turn(ids, prompt, OfferedTools(schemas=[DAYS]))
    assert isinstance(found, ParsedTurn), (found, qwen().tokenizer.decode(ids))
    [call] = found.calls
    assert call.name == "get_weather"
    assert 1 <= json.loads(call.arguments["days"]) <= 14
    assert call.arguments["at"] in {"x", "y"}


def test_a_format_that_writes_calls_otherwise_has_no_grammar_for_them(monkeypatch):
    monkeypatch.setattr(RenderersChat, "render_turn", lambda *_: [1])
    with pytest.raises(GrammarError, match="no grammar for calls"):
        grammar_for_calls(qwen(), [DAYS], "required")


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_structured_output_is_json_of_its_schema(seed):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99},
              "kind": {"enum": ["a", 'b"c', None]}}, "required": ["n", "kind"],
              "additionalProperties": False}  # fmt: skip
    value = json.loads(parsed(turn(grammar_for_schema(schema), seed)).text)
    assert value.keys() == {"n", "kind"}
    assert value["n"] <= 99
    assert value["kind"] in ["a", 'b"c', None]


def nested(depth, inner=None):
    schema = inner or {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HUGE = {"enum": [f"{'x' * 60}{n}" for n in range(2000)]}


@pytest.mark.parametrize(
    ("schema", "match"),
    [(nested(5_000), "levels of nesting"), (HUGE, "characters"), ([1], "an object")],
)
def test_schemas_beyond_the_bounds_are_refused_by_name(schema, match):
    with pytest.raises(GrammarError, match=rf"response_format.*{match}"):
        grammar_for_schema(schema, where="response_format")
    with pytest.raises(GrammarError, match=match):
        grammar_for_calls(chat(), [{"name": "f", "parameters": schema}], "required")


def chain(width):
    """Each definition refers to the next one twice: 2^width leaves, if it were written out."""
    levels = {
        f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2}
        for n in range(width)
    }
    return {"$defs": levels | {f"d{width}": {"type": "null"}}, "$ref": "#/$defs/d0"}


ANY_OF_ALL = {
    "allOf": [
        {"anyOf": [{"properties": {f"p{n}": {"const": m}}} for m in range(8)]} for n in range(12)
    ]
}
CATASTROPHE = {"type": "string", "pattern": "((x+x+)+y{1,999}){1,999}(a|b|c){1,5000}"}
WIDE = {"type": "object", "properties": {
    f"p{n}": {"type": "string", "pattern": "(a|b|ab)*c{1,99}"} for n in range(400)}}  # fmt: skip


@pytest.mark.parametrize(
    "schema", [nested(40), chain(40), ANY_OF_ALL, CATASTROPHE, WIDE, {"type": "nothing"}]
)
def test_a_hostile_schema_compiles_or_is_a_typed_error(schema):
    """And so does every mask of it, each within its bounds."""
    grammar = grammar_for_schema(schema)

    async def follow():
        matcher = await masks_of(chat()).open(grammar.text)
        for _ in range(20):
            token = int(np.flatnonzero(unpack_support(matcher.allowed(), 603))[0])
            matcher.accept(token)
            if token in chat().stop_ids:
                return

    try:
        asyncio.run(follow())
    except InvalidRequestError as error:
        assert str(error).startswith("sampling.grammar: ")


def test_what_a_plain_text_cannot_be_held_to_is_refused_in_a_strict_tool():
    tool = {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"at": {"type": "string", "format": "date"}}}}  # fmt: skip
    with pytest.raises(GrammarError, match=r"f\.at: format"):
        grammar_for_calls(chat(), [tool], "required")
    grammar_for_calls(chat(), [tool | {"strict": False}], "required")


def test_an_unknown_choice_is_refused():
    with pytest.raises(GrammarError, match=r"tool_choice.*'g'"):
        grammar_for_calls(chat(), TOOLS, "g")


def refers(to):
    return {"$ref": f"#/$defs/{to}"}


LINKS = {
    "allOf": lambda to: {"allOf": [refers(to), refers(to)]},
    "beside": lambda to: {**refers(to), "allOf": [refers(to)]},
    "properties": lambda to: {
        "type": "object",
        "properties": {"x": refers(to)},
        "allOf": [{"type": "object", "properties": {"x": refers(to)}}],
    },
    "items": lambda to: {"allOf": [{"type": "array", "items": refers(to)}] * 2},
    "quoted": lambda to: {"allOf": [{"$ref": f"#/%24defs/{to}"}] * 2},
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("as_tool", [False, True])
def test_definitions_that_name_the_next_one_twice_are_refused_not_written_out(link, as_tool):
    """The library would take all memory and end the generator's process."""
    definitions = {f"d{n}": LINKS[link](f"d{n + 1}") for n in range(30)} | {"d30": {"type": "null"}}
    schema = LINKS[link]("d0") | {"$defs": definitions}
    with pytest.raises(GrammarError, match="merged values and"):
        if as_tool:
            argument = {"type": "object", "properties": {"x": LINKS[link]("d0")}}
            parameters = {"properties": {"a": argument}, "$defs": definitions}
            grammar_for_calls(chat(), [{"name": "f", "parameters": parameters}], "required")
        else:
            grammar_for_schema(schema)


@pytest.mark.parametrize(
    "extra",
    [
        {"$id": "http://x/"},
        {"$anchor": "a"},
        {"allOf": [{"$ref": "other.json"}]},
        {"allOf": [{"$ref": "#/allOf/" + "1" * 5000}]},
    ],
)
def test_a_name_that_hides_what_is_merged_is_refused(extra):
    inner = {"allOf": [refers("a")], "$defs": {"a": {"type": "null"}}} | extra
    schema = {"type": "object", "properties": {"x": inner}, "$defs": {"a": {"type": "null"}}}
    with pytest.raises(GrammarError, match=r"not supported together with allOf|expected a #/"):
        grammar_for_schema(schema)


def test_schemas_as_pydantic_writes_them_are_merged():
    node = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "kind": {"allOf": [refers("kind")], "default": "leaf"},
            "left": {**refers("node"), "description": "a subtree"},
            "right": {"anyOf": [refers("node"), {"type": "null"}]},
        },
        "required": ["kind"],
    }
    node["properties"] |= {f"more{n}": {"allOf": [refers("kind")]} for n in range(100)}
    schema = {**refers("node"), "$id": "http://example.com/tree", "title": "Tree"}
    schema["$defs"] = {"node": node, "kind": {"enum": ["leaf", "branch"]}}
    said = asyncio.run(masks_of(chat()).open(grammar_for_schema(schema).text))
    assert said.allowed().any()
