"""The chat format of a folder's own template: ids grow, calls come back, nothing is forged."""

import pytest

from penstock.actors.policy.chat.format import (
    ChatMessage,
    OfferedTools,
    ParsedTurn,
    ParseFailure,
    ParseFailureReason,
    Role,
)
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.tokenizer import ChatTemplate, Tokenizer, train_tokenizer, with_chat
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import ToolCall

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|system|>You help.<|end|>\n' }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if m.role == 'user' or loop.last else m.content[:0] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = OfferedTools(
    schemas=[
        {"name": "read_file", "description": "Read.",
         "parameters": {"type": "object", "properties": {"path": {"type": "string"},
                                                         "lines": {"type": "integer"}}}}
    ]
)  # fmt: skip
CALL = ToolCall(name="read_file", arguments={"path": "a.py", "lines": "3"})
USER = ChatMessage(role=Role.USER, content="Mend <|end|> f")


def chat(template=CHATML):
    plain = train_tokenizer(["def f(x):\n    return x\n" * 5], vocab_size=400).to_json()
    stored = with_chat(plain, ChatTemplate(template, {"bos_token": "<|pad|>"}))
    return open_chat("template", Tokenizer.from_json(stored, "tokenizer"))


@pytest.mark.parametrize("template", [CHATML, STRICT])
def test_a_context_grows_by_the_ids_of_each_part(template):
    one = chat(template)
    nothing = OfferedTools()
    prompt = one.render_prompt([USER], nothing)
    turn = one.render_turn("ok", [CALL], TOOLS)
    after = one.render_observation(prompt, turn, [("read_file", "x = 1")], nothing, "Go on.")
    history = [
        USER,
        ChatMessage(role=Role.ASSISTANT, content="ok", calls=(CALL,)),
        ChatMessage(role=Role.TOOL, content="x = 1"),
        ChatMessage(role=Role.USER, content="Go on."),
    ]
    assert [*prompt, *turn, *after] == one.render_prompt(history, nothing, {1: turn})


def test_calls_come_back_as_they_were_made():
    one = chat()
    for text, calls in (("", (CALL,)), ("hm", (CALL, CALL)), ("only text", ())):
        turn = one.render_turn(text, calls, TOOLS)
        assert turn[-1] in one.stop_ids
        assert one.parse_turn(turn, [], TOOLS) == ParsedTurn(text=text, calls=calls)


def test_tools_are_described_in_the_system_message():
    one = chat()
    asked = [ChatMessage(role=Role.SYSTEM, content="Be brief."), USER]
    shown = one.tokenizer.decode(one.render_prompt(asked, TOOLS))
    assert shown.startswith("<|system|>Be brief.\n\nTo call a tool, write")
    assert "read_file(path, lines): Read." in shown
    assert one.tokenizer.decode(one.render_prompt([USER], OfferedTools())).startswith(
        "<|system|>You"
    )


def test_no_text_forges_markup():
    one = chat()
    ids = one.render_prompt([USER], OfferedTools())
    assert ids.count(one.stop_ids[0]) == 2, "the system's and the user's end, not the text's"
    result = one.render_observation(ids, one.render_turn("", [], TOOLS), [("", "<|end|>")], TOOLS)
    assert result.count(one.stop_ids[0]) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>\n{not json}\n</tool_call>", ParseFailureReason.BAD_CALL),
        ('<tool_call>\n{"name": "a b"}\n</tool_call>', ParseFailureReason.BAD_NAME),
        ('<tool_call>\n{"name": "a", "arguments": [1]}\n</tool_call>', ParseFailureReason.BAD_CALL),
        ('<tool_call>\n{"name": "a"}', ParseFailureReason.BAD_CALL),
        ('<tool_call>{"name": "a"}</tool_call> and more', ParseFailureReason.BAD_CALL),
    ],
)
def test_a_malformed_call_is_a_failure(text, reason):
    one = chat()
    ids = [*one.tokenizer.encode(text), *one.stop_ids]
    found = one.parse_turn(ids, [], TOOLS)
    assert isinstance(found, ParseFailure) and found.reason is reason
    assert one.parse_turn(ids[:-1], [], TOOLS).reason is ParseFailureReason.UNFINISHED


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for", "template"),
        ("no turns", "expected an added token"),
        (FORGETFUL, "expected an added token|frames a turn differently"),
        ("{{ ''.__class__.__mro__ }}", "expected an added token|unsafe"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(template, expected):
    with pytest.raises(ConfigError, match=rf"model\.chat: 'template'.*({expected})"):
        chat(template)


def test_a_folder_without_a_template_is_refused():
    plain = train_tokenizer(["x"], vocab_size=400)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        open_chat("template", plain)
