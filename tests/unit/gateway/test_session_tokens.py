"""An external session has the tokens of the same conversation in a file of preferences."""

import json

import msgspec
import pytest
from tests.outside_model import qwen_tokenizer

from penstock.actors.policy.chat.format import UnrenderableError
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.actors.rollout_worker.conversation import offered_tools
from penstock.gateway.conversation import LiveRequest
from penstock.gateway.exchange.plan import messages_of
from penstock.gateway.exchange.session_tokens import check_session, session_tokens
from penstock.gateway.routes.chat import ChatBodyMessage, read_messages
from penstock.infra.corpora.preferences import read_preferences

TOOLS = offered_tools("1")


def call(name):
    function = {"name": "read_file", "arguments": json.dumps({"path": name})}
    return {"id": name, "type": "function", "function": function}


PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Mend f"}]
REPLY = [
    {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]},
    {"role": "tool", "tool_call_id": "a", "content": "def f(): ..."},
    {"role": "tool", "tool_call_id": "b", "content": "nothing"},
    {"role": "assistant", "content": "done"},
]
TALK = [*REPLY, {"role": "user", "content": "And g?"}, {"role": "assistant", "content": "too"}]


def rendered(chat, reply, tokens_max=4096):
    body = msgspec.convert([*PROMPT, *reply], list[ChatBodyMessage])
    said = read_messages(body)
    assert check_session(said) == sum(one["role"] == "assistant" for one in reply)
    messages = messages_of(LiveRequest(model="", messages=said))
    return session_tokens(chat, messages, TOOLS, tokens_max)


@pytest.mark.parametrize(
    ("name", "reply"), [("penstock", REPLY), ("penstock", TALK), ("renderers:qwen3", REPLY)]
)
def test_it_is_rendered_as_episodes_are(tmp_path, name, reply):
    is_own = name == "penstock"
    tokenizer = train_tokenizer(["Mend f in m.py"], 330) if is_own else qwen_tokenizer()
    chat = open_chat(name, tokenizer)
    found = rendered(chat, reply)
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT, "completion": reply, "label": True}))
    [expected] = read_preferences([str(path)], chat, TOOLS, 4096)
    assert found.context_ids == expected.context
    assert found.reply_ids == expected.chosen.token_ids
    targets = [True] * len(found.reply_ids)
    for start, end in found.between:
        targets[start:end] = [False] * (end - start)
    assert targets == expected.chosen.targets


def test_a_long_one_is_not_rendered_to_its_end():
    chat = open_chat("penstock", train_tokenizer(["Mend f in m.py"], 330))
    whole = rendered(chat, TALK)
    cut = rendered(chat, TALK, tokens_max=len(whole.context_ids) + 1)
    assert len(cut.between) == 0 and cut.num_tokens > len(whole.context_ids) + 1


def test_a_format_that_changes_earlier_turns_says_so():
    class Forgetful:
        def __init__(self, chat):
            self.render_prompt, self.render_turn = chat.render_prompt, chat.render_turn

        def render_observation(self, *_):
            return None

    chat = open_chat("penstock", train_tokenizer(["Mend f in m.py"], 330))
    with pytest.raises(UnrenderableError, match="one by one"):
        rendered(Forgetful(chat), TALK)
