"""Pairs and labels of files: to token ids, or refused with file, line and field."""

import json

import pytest
from tests.outside_model import qwen_tokenizer

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatMessage, Role
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.actors.rollout_worker.conversation import offered_tools
from penstock.actors.trainer.preferences.examples import (
    PREFERENCES_HELDOUT_KEY,
    PREFERENCES_KEY,
    decode_examples,
)
from penstock.infra.corpora.preferences import preference_objects, read_preferences
from penstock.infra.models.settings import ModelSection
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import ToolCall

TOOLS = offered_tools("1")
CALL = {"id": "c", "type": "function",
        "function": {"name": "read_file", "arguments": '{"path": "m.py"}'}}  # fmt: skip
PROMPT = [{"role": "user", "content": "Mend f"}]
YES, NO = [{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]
PAIR = {"prompt": PROMPT, "chosen": [{"role": "assistant", "tool_calls": [CALL]}], "rejected": NO}
LABEL = {"prompt": PROMPT, "completion": YES, "label": False, "weight": 0.25}
LONG = [
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "def f(): ..."},
    {"role": "assistant", "content": "done"},
]


@pytest.fixture(scope="module", params=["penstock", "renderers:qwen3"])
def chat(request):
    if request.param == "penstock":
        return open_chat("penstock", train_tokenizer(["Mend f in m.py"], 330))
    return open_chat(request.param, qwen_tokenizer())


def written(tmp_path, *lines) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    )
    return str(path)


def read(chat, path, tokens_max=4096):
    return list(read_preferences([path], chat, TOOLS, tokens_max))


def test_pairs_and_labels_are_rendered_as_episodes_are(chat, tmp_path):
    pair, label = read(chat, written(tmp_path, PAIR, "", LABEL))
    prompt = chat.render_prompt([ChatMessage(role=Role.USER, content="Mend f")], TOOLS)
    call = [ToolCall(name="read_file", arguments={"path": "m.py"})]
    assert pair.context == label.context == prompt
    assert pair.chosen.token_ids == chat.render_turn("", call, TOOLS)
    assert pair.rejected.token_ids == chat.render_turn("no", (), TOOLS)
    assert all(pair.chosen.targets) and all(pair.rejected.targets)
    assert label.chosen is None and label.weight == 0.25
    assert label.rejected.token_ids == chat.render_turn("yes", (), TOOLS)


def test_of_a_reply_over_several_turns_only_the_assistant_s_count(tmp_path):
    chat = open_chat("penstock", train_tokenizer(["Mend f in m.py"], 330))
    [pair] = read(chat, written(tmp_path, PAIR | {"chosen": LONG}))
    reply = pair.chosen
    targets = [i for i, counts in zip(reply.token_ids, reply.targets, strict=True) if counts]
    call = [ToolCall(name="read_file", arguments={"path": "m.py"})]
    assert targets == chat.render_turn("", call) + chat.render_turn("done")
    others = [i for i, counts in zip(reply.token_ids, reply.targets, strict=True) if not counts]
    assert "def f(): ..." in chat.tokenizer.decode(others)


def test_what_a_context_says_can_be_read_back_as_messages():
    chat = PenstockChat(train_tokenizer(["Mend f in m.py"], 330))
    call = ToolCall(name="read_file", arguments={"path": "m.py"})
    messages = [
        ChatMessage(role=Role.SYSTEM, content="Be <|end|> short"),
        ChatMessage(role=Role.USER, content="Mend f"),
        ChatMessage(role=Role.ASSISTANT, content="so", calls=(call,)),
        ChatMessage(role=Role.TOOL, content="x"),
    ]
    ids = chat.render_prompt(messages)
    assert chat.read_prompt(ids) == messages
    assert chat.read_prompt(ids[:-1]) is None and chat.read_prompt(ids[1:]) is None
    assert chat.read_turn(chat.render_turn("so", [call])) == messages[2]
    assert chat.read_turn([*chat.render_turn("so"), 1]) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", r"p.jsonl:2: Input data was truncated"),
        (PAIR | {"prompt": "Mend f"}, r"p.jsonl:2: Expected `array`, got `str` - at `\$.prompt`"),
        (PAIR | {"prompt": []}, r"p.jsonl:2: prompt: expected messages, the last not"),
        (PAIR | {"prompt": [*PROMPT, *YES]}, r"prompt: expected messages, the last not"),
        (PAIR | {"chosen": PROMPT}, r"chosen: expected messages, the first and last an assist"),
        (PAIR | {"chosen": []}, r"chosen: expected messages, the first and last an assistant"),
        (PAIR | {"chosen": NO}, r"rejected: expected a reply other than `chosen`"),
        ({"prompt": PROMPT, "chosen": YES}, r"rejected: expected it in a pair"),
        ({"prompt": PROMPT}, r"expected `chosen` and `rejected`, or `completion` and `label`"),
        (PAIR | {"label": True}, r"completion, label: expected neither in a pair"),
        (LABEL | {"label": "yes"}, r"Expected `bool \| null`, got `str` - at `\$.label`"),
        (LABEL | {"weight": -1}, r"Expected `float` >= 0.0 - at `\$.weight`"),
        (LABEL | {"wieght": 1}, r"unknown field `wieght`"),
        (LABEL | {"completion": [*YES, *NO]}, r"messages\[2\]: expected another role before"),
        (
            LABEL | {"completion": [{"role": "assistant", "tool_calls": [CALL]}, *YES]},
            r"prompt and completion: messages\[2\]: expected the results of 1 calls first",
        ),
    ],
)
def test_a_bad_line_is_refused_by_file_line_and_field(chat, tmp_path, line, expected):
    with pytest.raises(ConfigError, match=r"model.preferences: .*" + expected):
        read(chat, written(tmp_path, PAIR, line))


def test_a_line_that_is_too_long_is_refused_and_not_cut(chat, tmp_path):
    with pytest.raises(ConfigError, match=r"p.jsonl:1: chosen: .* more than the policy's 5"):
        read(chat, written(tmp_path, PAIR), tokens_max=5)


def test_every_line_is_trained_or_held_out(tmp_path):
    chat = open_chat("penstock", train_tokenizer(["Mend f in m.py"], 330))
    lines = [PAIR | {"prompt": [{"role": "user", "content": f"Mend f{i}"}]} for i in range(45)]
    objects = preference_objects([written(tmp_path, *lines)], chat, TOOLS, 4096)
    counts = [
        len(decode_examples(objects[key], 330, 4096))
        for key in (PREFERENCES_KEY, PREFERENCES_HELDOUT_KEY)
    ]
    assert counts == [42, 3]
    with pytest.raises(ConfigError, match="expected at least two lines, got 1"):
        preference_objects([written(tmp_path, PAIR)], chat, TOOLS, 4096)
    with pytest.raises(ConfigError, match=r"model.preferences: .*no such file"):
        preference_objects([str(tmp_path / "none")], chat, TOOLS, 4096)


def test_preferences_need_a_checkpoint():
    with pytest.raises(ConfigError, match=r"model.preferences: expected with it model.checkpoint"):
        ModelSection(preferences=["p.jsonl"])
