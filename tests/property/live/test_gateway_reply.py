"""Sampled ids become the same content and calls, however they are cut into chunks."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import OfferedTools
from penstock.actors.policy.tokenizer import Tokenizer, train_tokenizer
from penstock.gateway.conversation import CallDelta, TextDelta
from penstock.gateway.exchange.reply import ReplyAssembler
from penstock.messages.rollout import ToolCall

TOOLS = ("edit_file", "my_tool")


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 4, vocab_size=330)


@cache
def chat() -> PenstockChat:
    return PenstockChat(tokenizer())


texts = st.text(max_size=12)
calls = st.builds(
    ToolCall,
    name=st.sampled_from(TOOLS),
    arguments=st.dictionaries(st.sampled_from(["path", "old", "mode"]), texts, max_size=3),
)


def assembled(ids, cuts, tools=TOOLS) -> tuple[ReplyAssembler, list]:
    reply = ReplyAssembler(chat(), tools, (), OfferedTools())
    deltas, last = [], 0
    for cut in [*sorted(cuts), len(ids)]:
        deltas += reply.push(ids[last:cut])
        last = cut
    return reply, deltas + reply.finish()


def positions(ids):
    return st.lists(st.integers(0, len(ids)), max_size=6)


@given(st.data(), texts, st.lists(calls, max_size=3))
def test_a_well_formed_turn_comes_back_whole(data, text, made):
    ids = chat().render_turn(text, made)
    reply, deltas = assembled(ids, data.draw(positions(ids)))
    assert reply.text == text
    assert reply.calls == made
    assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == text
    assert [(d.index, d.call) for d in deltas if isinstance(d, CallDelta)] == list(enumerate(made))


@given(st.data(), st.lists(st.integers(0, 2**16), max_size=24))
def test_any_ids_give_the_same_reply_in_any_chunks(data, numbers):
    ids = [number % tokenizer().vocab_size for number in numbers]
    reply, _ = assembled(ids, [])
    again, deltas = assembled(ids, data.draw(positions(ids)))
    assert (again.text, again.calls) == (reply.text, reply.calls)
    assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == reply.text


@given(texts, calls)
def test_calls_of_tools_that_were_not_offered_are_shown_as_text(text, call):
    ids = chat().render_turn(text, [call])
    reply, _ = assembled(ids, [], tools=())
    assert reply.calls == []
    assert reply.text == tokenizer().decode(ids[:-1])
    reply, _ = assembled(ids, [], tools=["other"])
    assert (reply.text, reply.calls) == (tokenizer().decode(ids[:-1]), [])


def test_a_call_that_was_cut_off_is_not_shown():
    ids = chat().render_turn("x", [ToolCall(name="edit_file", arguments={"path": "a"})])
    cut = ids[: ids.index(tokenizer().special_id(special_tokens.CALL_CLOSE))]
    reply, _ = assembled(cut, [])
    assert reply.calls == []
    assert reply.text == "x"
