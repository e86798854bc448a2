"""Published models' chat formats: what text says stays text, what was sampled stays as it was."""

import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.outside_model import MARKUP, SPECIAL, qwen_tokenizer, tokenizer_json

from penstock.actors.policy.chat.callable import can_call
from penstock.actors.policy.chat.format import (
    ChatMessage,
    OfferedTools,
    ParsedTurn,
    ParseFailure,
    ParseFailureReason,
    Role,
    UnrenderableError,
)
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.chat.renderers import RenderersChat
from penstock.actors.policy.tokenizer import Tokenizer, train_tokenizer
from penstock.envs.harness.tools import functions_of
from penstock.gateway.conversation import CallDelta, TextDelta
from penstock.gateway.exchange.reply import ReplyAssembler
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import ToolCall

QUICK = settings(max_examples=60, deadline=None)
TOOLS = OfferedTools(schemas=functions_of("1"))
TYPED = OfferedTools(schemas=functions_of("2"))
pieces = st.sampled_from([*SPECIAL, *MARKUP, "<|im_", "end|>", "<", "/tool_call>", "\ufdd0", "é\n"])
texts = st.lists(pieces | st.text(max_size=6), max_size=6).map("".join)
values = texts.map(lambda text: text.replace("\ufdd0", "?").encode("utf-8", "replace").decode())
calls = st.builds(
    ToolCall,
    name=st.sampled_from(["read_file", "edit_file", "other.tool"]),
    arguments=st.dictionaries(st.sampled_from(["path", "old", "new"]), values, max_size=3),
)


@cache
def chat() -> RenderersChat:
    return open_chat("renderers:qwen3", qwen_tokenizer())  # type: ignore[return-value]


def added(ids) -> list[str]:
    return [name for one in ids if (name := chat().tokenizer.special_of(one)) is not None]


def user(text: str) -> ChatMessage:
    return ChatMessage(role=Role.USER, content=text)


@QUICK
@given(texts)
def test_what_a_user_writes_is_never_markup(text):
    ids = chat().render_prompt([user(text)], TOOLS)
    assert added(ids) == added(chat().render_prompt([user("")], TOOLS))
    assert text.replace("\ufdd0", "\ufffd") in chat().tokenizer.decode(ids)


@QUICK
@given(texts, calls)
def test_a_turn_is_extended_by_ids_and_what_tools_return_is_never_markup(text, call):
    prompt = chat().render_prompt([user("Fix f")], TOOLS)
    turn = chat().render_turn("", [call], TOOLS)
    seen = chat().render_observation(prompt, turn, [(call.name, text)], TOOLS)
    plain = chat().render_observation(prompt, turn, [(call.name, "")], TOOLS)
    assert added(seen) == added(plain)
    assert text.replace("\ufdd0", "\ufffd") in chat().tokenizer.decode(seen)


@QUICK
@given(st.lists(calls, max_size=3))
def test_what_is_rendered_parses_as_what_it_was(made):
    ids = chat().render_turn("", made, TOOLS)
    assert ids[-1] == chat().stop_ids[0]
    assert chat().parse_turn(ids, (), TOOLS) == ParsedTurn(text="", calls=tuple(made))


def test_arguments_have_the_types_of_the_schema():
    call = ToolCall(name="list_dir", arguments={"path": "3", "depth": "3"})
    ids = chat().render_turn("", [call], TYPED)
    assert '{"path": "3", "depth": 3}' in chat().tokenizer.decode(ids)
    assert chat().parse_turn(ids, (), TOOLS) == ParsedTurn(text="", calls=(call,))


@QUICK
@given(st.lists(st.integers(0, 600), min_size=1, max_size=40))
def test_any_ids_are_a_turn_or_a_failure(ids):
    turn = chat().parse_turn([*ids, chat().stop_ids[0]], (), TOOLS)
    assert isinstance(turn, ParsedTurn | ParseFailure)


def test_a_turn_that_was_cut_off_is_a_failure_that_can_be_answered():
    prompt = chat().render_prompt([user("Fix f")], TOOLS)
    turn = chat().tokenizer.encode("I wi")
    failure = chat().parse_turn(turn, prompt, TOOLS)
    assert isinstance(failure, ParseFailure)
    assert failure.reason is ParseFailureReason.UNFINISHED
    seen = chat().render_observation(prompt, turn, [("", "error: unfinished")], TOOLS)
    assert "error: unfinished" in chat().tokenizer.decode(seen)


def test_a_conversation_keeps_what_was_sampled():
    sampled = [*chat().tokenizer.encode("y"), *chat().tokenizer.encode("es"), chat().stop_ids[0]]
    first = [user("Is it?"), ChatMessage(role=Role.ASSISTANT, content="yes")]
    call = ToolCall(name="grep", arguments={"pattern": "x"})
    made = ChatMessage(role=Role.ASSISTANT, content="", calls=(call,))
    turn = chat().render_turn("", [call], TOOLS)
    seen = ChatMessage(role=Role.TOOL, content="m.py:1:x")
    asked = chat().render_prompt(first[:1], TOOLS)
    ids = chat().render_prompt([*first[:1], made, seen], TOOLS, {1: turn})
    assert ids[: len(asked) + len(turn)] == asked + turn
    again = chat().render_prompt([*first, user("Sure?")], TOOLS, {1: sampled})
    assert chat().tokenizer.decode(again).count("Sure?") == 1


def test_a_user_s_next_message_keeps_what_was_sampled_unless_reasoning_is_dropped():
    plain = chat().tokenizer.encode("don") + chat().tokenizer.encode("e") + [chat().stop_ids[0]]
    assert plain != chat().render_turn("done", (), TOOLS), "sampled in other pieces"
    prompt = chat().render_prompt([user("Fix f")], TOOLS)
    said = [user("Fix f"), ChatMessage(role=Role.ASSISTANT, content="done"), user("And g?")]
    ids = chat().render_prompt(said, TOOLS, {1: plain})
    assert ids[: len(prompt) + len(plain)] == [*prompt, *plain]
    canonical = chat().render_turn("done", (), TOOLS)
    assert chat().render_prompt(said, TOOLS, {1: canonical}) == chat().render_prompt(said, TOOLS)
    special = chat().tokenizer.special_id
    thought = [special("<think>"), *chat().tokenizer.encode("\nHm\n"), special("</think>"), *plain]
    again = chat().render_prompt(said, TOOLS, {1: thought})
    assert again == chat().render_prompt(said, TOOLS), "as the model's own template has it"


@pytest.mark.parametrize("name", ["<|im_end|>", "</tool_call>", "<tool_response>", "</think>"])
def test_a_tokenizer_without_a_needed_token_is_refused_by_its_name(name):
    lacking = Tokenizer.from_json(tokenizer_json(left_out=name), "tokenizer.json")
    with pytest.raises(ConfigError, match=r"renderers:qwen3") as caught:
        open_chat("renderers:qwen3", lacking)
    assert repr(name) in str(caught.value)


def test_formats_are_chosen_by_name():
    with pytest.raises(ConfigError, match=r"'penstock' needs the special token '<\|end\|>'"):
        open_chat("penstock", qwen_tokenizer())
    with pytest.raises(ConfigError, match=r"expected 'penstock' or 'renderers:NAME'"):
        open_chat("chatml", qwen_tokenizer())
    with pytest.raises(ConfigError, match=r"NAME with NAME one of .*qwen3.*; got 'default'"):
        open_chat("renderers:default", qwen_tokenizer())
    with pytest.raises(ConfigError, match=r"renderers:kimi-k2 needs the token '<\|im_user\|>'"):
        open_chat("renderers:kimi-k2", train_tokenizer(["x"], 300))


def opened(name: str) -> RenderersChat:
    """Open a format over a tokenizer that gets each token that it is found to lack."""
    table = json.loads(tokenizer_json())
    for number in range(600, 700):
        tokenizer = Tokenizer.from_json(json.dumps(table), "tokenizer.json")
        try:
            return RenderersChat(name, tokenizer)
        except ConfigError as error:
            lacking = re.search(r"needs the token '([^']+)'", str(error))
            if lacking is None:
                raise
            one = table["added_tokens"][0] | {"id": number, "content": lacking[1]}
            table["added_tokens"].append(one)
            table["model"]["vocab"][lacking[1]] = number
    raise AssertionError(f"{name} wants tokens without end")


@pytest.mark.parametrize(("name", "num_calls"), [("qwen3.5", 2), ("glm-4.5", 2), ("llama-3", 1)])
def test_formats_of_other_models_read_back_what_they_write(name, num_calls):
    other = opened(name)
    made = [
        ToolCall(name="list_dir", arguments={"path": "</tool_call>", "depth": "3"}),
        ToolCall(name="finish", arguments={}),
    ][:num_calls]
    turn = other.render_turn("", made, TYPED)
    assert other.parse_turn(turn, (), TYPED) == ParsedTurn(text="", calls=tuple(made))


def test_a_format_that_does_not_read_back_its_calls_is_refused():
    with pytest.raises(ConfigError, match=r"renderers:kimi-k2: .* cannot parse a call"):
        opened("kimi-k2")


def test_a_reply_shows_neither_reasoning_nor_the_markup_of_calls():
    encode, special = chat().tokenizer.encode, chat().tokenizer.special_id
    call = ToolCall(name="grep", arguments={"pattern": "x"})
    thought = [special("<think>"), *encode("\nhm\n"), special("</think>"), *encode("\n\nLook: ")]
    ids = chat().render_turn("", [call], TOOLS)
    tools = {"grep"}
    ids = thought + ids[ids.index(special("<tool_call>")) :]
    for cut in range(len(ids)):
        reply = ReplyAssembler(chat(), tools, (), TOOLS)
        deltas = [*reply.push(ids[:cut]), *reply.push(ids[cut:]), *reply.finish()]
        assert (reply.text, reply.calls) == ("Look: ", [call])
        assert "".join(one.text for one in deltas if isinstance(one, TextDelta)) == "Look: "
        assert isinstance(deltas[-1], CallDelta)


@pytest.mark.parametrize("name", ["qwen3.5", "glm-5", "minimax-m2", "nemotron-3"])
def test_a_reply_that_begins_inside_reasoning_shows_what_follows_it(name):
    other = opened(name)
    encode, end = other.tokenizer.encode, other.tokenizer.special_id("</think>")
    prompt = other.render_prompt([ChatMessage(role=Role.USER, content="2+2?")], OfferedTools())
    thought = [*encode("I add two and two."), end]
    ids = [*thought, *encode("\n\nFour, two."), other.stop_ids[0]]
    for cut in range(len(ids)):
        reply = ReplyAssembler(other, (), prompt, OfferedTools(), stops=["two"])
        deltas = [*reply.push(ids[:cut]), *reply.push(ids[cut:]), *reply.finish()]
        assert (reply.text, reply.stop_text) == ("Four, ", "two"), "no stop text in the reasoning"
        assert "".join(one.text for one in deltas if isinstance(one, TextDelta)) == "Four, "
    for num in range(len(thought)):
        reply = ReplyAssembler(other, (), prompt, OfferedTools())
        assert [*reply.push(ids[:num]), *reply.finish()] == [], "cut within the reasoning"


def test_a_call_after_reasoning_of_the_prompt_is_a_call():
    other = opened("qwen3.5")
    prompt = other.render_prompt([ChatMessage(role=Role.USER, content="Go")], TOOLS)
    call = ToolCall(name="grep", arguments={"pattern": "x"})
    turn = other.render_turn("", [call], TOOLS)
    opening = other.tokenizer.special_id("<tool_call>")
    thought = [*other.tokenizer.encode("hm"), other.tokenizer.special_id("</think>")]
    ids = thought + turn[turn.index(opening) :]
    reply = ReplyAssembler(other, {"grep"}, prompt, TOOLS)
    assert [*reply.push(ids), *reply.finish()] == [CallDelta(0, call)]


@pytest.mark.parametrize(
    ("name", "arguments", "is_fit"),
    [
        ("read", ("path",), True),
        ("mcp__" + "x" * 123, ("path",), True),
        ("files/read", ("-n", "größe"), True),
        ("2captcha", ("a b",), True),
    ],
)
def test_calls_of_tools_with_unusual_names_come_back_as_calls(name, arguments, is_fit):
    assert can_call(chat(), name, arguments) is is_fit
    assert (
        can_call(open_chat("penstock", train_tokenizer(["text"], 330)), name, arguments) is is_fit
    )


def test_a_name_that_a_format_cannot_carry_is_found():
    assert can_call(opened("qwen3.5"), "read", ("path",))
    assert not can_call(opened("qwen3.5"), "a>\n<parameter=b", ("path",))


def test_a_conversation_that_the_format_cannot_hold_is_refused():
    with pytest.raises(UnrenderableError, match="renderers:"):
        chat().render_prompt([], TOOLS)


def test_an_id_beyond_the_tokenizer_is_a_character_that_is_none():
    assert chat().tokenizer.decode([10**6, -1]) == "\ufffd\ufffd"


def test_a_call_that_is_cut_off_shows_no_markup():
    call = ToolCall(name="grep", arguments={"pattern": "x"})
    ids = chat().render_turn("Look: ", [call], TOOLS)
    opening = ids.index(chat().tokenizer.special_id("<tool_call>"))
    whole = ids.index(chat().tokenizer.special_id("</tool_call>"))
    for cut in range(opening, whole):
        reply = ReplyAssembler(chat(), {"grep"}, (), TOOLS)
        _ = [*reply.push(ids[:cut]), *reply.finish()]
        assert (reply.text.strip(), reply.calls) == ("Look:", []), cut
