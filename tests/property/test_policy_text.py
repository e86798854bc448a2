"""Tokenizer and chat format: all round-trips, and only the format writes special tokens."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import (
    ChatMessage,
    ParsedTurn,
    ParseFailure,
    ParseFailureReason,
    Role,
)
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer, train_tokenizer
from penstock.messages.rollout import ToolCall

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
TOKENIZER = train_tokenizer(TEXTS, vocab_size=600)
CHAT = PenstockChat(TOKENIZER)
PLAIN = st.text(max_size=60) | st.sampled_from(["<|end|>", "</path>", "a < b\n", '<call name="x">'])
NAMES = st.sampled_from([*special_tokens.TOOL_NAMES, "other_tool", "x.y-z"])
ARGUMENTS = st.sampled_from([*special_tokens.ARGUMENT_NAMES, "count", "odd_name"])
CALLS = st.builds(ToolCall, name=NAMES, arguments=st.dictionaries(ARGUMENTS, PLAIN, max_size=3))


def drop_surrogates(text):
    return text.encode("utf-8", "ignore").decode()


@given(st.binary(max_size=200))
def test_any_bytes_round_trip(data):
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(data)) == data


@given(PLAIN)
def test_any_text_round_trips_without_marks(text):
    text = drop_surrogates(text)
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert [index for index in ids if TOKENIZER.special_of(index)] == []


@given(PLAIN, st.lists(CALLS, max_size=3))
@settings(max_examples=200, deadline=None)
def test_turns_round_trip(text, calls):
    ids = CHAT.render_turn(drop_surrogates(text), calls)
    assert CHAT.parse_turn(ids) == ParsedTurn(text=drop_surrogates(text), calls=tuple(calls))


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_ids_parse_or_fail_with_a_reason(ids):
    parsed = CHAT.parse_turn(ids)
    if isinstance(parsed, ParseFailure):
        assert 0 <= parsed.position <= len(ids)
    else:
        assert ids[-1] == CHAT.end_id


def test_a_known_call_costs_one_token_a_tag():
    call = ToolCall(name="edit_file", arguments={"path": "a", "old": "x", "new": "y"})
    ids = CHAT.render_turn("", [call])
    assert [TOKENIZER.special_of(index) for index in ids if TOKENIZER.special_of(index)] == [
        '<call name="edit_file">',
        *["<path>", "</path>", "<old>", "</old>", "<new>", "</new>"],
        "</call>",
        "<|end|>",
    ]
    assert len(ids) == 12


@pytest.mark.parametrize(
    ("ids", "reason", "position"),
    [
        (["<path>"], ParseFailureReason.UNEXPECTED, 0),
        (["<|user|>", "<|end|>"], ParseFailureReason.UNEXPECTED, 0),
        (["</call>", "<|end|>"], ParseFailureReason.UNEXPECTED, 0),
        ([], ParseFailureReason.UNFINISHED, 0),
        (['<call name="finish">'], ParseFailureReason.UNFINISHED, 1),
        (['<call name="finish">', "</call>"], ParseFailureReason.UNFINISHED, 2),
        (['<call name="finish">', "<path>", "</old>"], ParseFailureReason.UNEXPECTED, 2),
        (["<|end|>", "<|end|>"], ParseFailureReason.UNEXPECTED, 1),
        (['<call name="', '"|>', "</call>", "<|end|>"], ParseFailureReason.BAD_NAME, 0),
        (
            ['<call name="finish">', "<path>", "</path>", "<path>", "</path>", "</call>"],
            ParseFailureReason.DUPLICATE_ARGUMENT,
            3,
        ),
    ],
)
def test_malformed_turns_say_what_and_where(ids, reason, position):
    failure = CHAT.parse_turn([TOKENIZER.special_id(name) for name in ids])
    assert isinstance(failure, ParseFailure)
    assert (failure.reason, failure.position) == (reason, position)


def test_text_between_arguments_is_refused():
    ids = [TOKENIZER.special_id('<call name="finish">'), *TOKENIZER.encode("x")]
    failure = CHAT.parse_turn([*ids, TOKENIZER.special_id("</call>"), CHAT.end_id])
    assert isinstance(failure, ParseFailure)
    assert failure.position == 1


def test_prompts_end_where_the_assistant_begins():
    ids = CHAT.render_prompt(
        [
            ChatMessage(role=Role.SYSTEM, content="s"),
            ChatMessage(role=Role.USER, content="<|end|>"),
        ],
    )
    text = TOKENIZER.decode(ids)
    assert text == "<|system|>s<|end|><|user|><|end|><|end|><|assistant|>"
    assert ids.count(CHAT.end_id) == 2
    observed = TOKENIZER.decode(CHAT.render_observation((), (), [("", "a"), ("", "b")]))
    assert observed == "<|tool|>a<|end|><|tool|>b<|end|><|assistant|>"


def test_training_is_deterministic_and_survives_a_save():
    text = train_tokenizer(TEXTS, vocab_size=600).to_json()
    assert text == TOKENIZER.to_json()
    loaded = Tokenizer.from_json(text, TOKENIZER_KEY)
    assert loaded.encode("def f(x): <|end|> 42") == TOKENIZER.encode("def f(x): <|end|> 42")
    assert PenstockChat(loaded).end_id == CHAT.end_id


def test_digits_and_operators_stand_alone():
    pieces = [TOKENIZER.decode([index]) for index in TOKENIZER.encode("x[i]<=123")]
    assert pieces[-3:] == ["1", "2", "3"]
    assert "<=" in pieces or pieces[-5:-3] == ["<", "="]


def test_bad_tokenizer_files_and_sizes_are_refused():
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_json("{}", TOKENIZER_KEY)
    with pytest.raises(ValueError, match="vocab_size"):
        train_tokenizer([], vocab_size=256)
