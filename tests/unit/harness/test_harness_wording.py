"""The prompt's words on tools: frozen by version, equal in training and in production."""

import hashlib

import msgspec
import pytest

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatMessage, Role
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.actors.rollout_worker.conversation import Conversation, offered_tools
from penstock.envs.harness.tools import TOOLS_2, prompt_for, tool_schemas, tools_prompt
from penstock.gateway.exchange.plan import messages_of, told_tools
from penstock.gateway.routes.chat import read_chat
from penstock.messages.errors import NotFoundError
from penstock.messages.task import Split, Task

FROZEN = "2eb7a296bea40d56"
"""Of version 2's words: other words are another version."""


def task() -> Task:
    return Task(task_id="t", category="r", split=Split.TRAIN, instruction="Fix f", files={})


def test_the_words_of_a_version_never_change():
    assert tools_prompt("1") == ""
    assert hashlib.sha256(tools_prompt("2").encode()).hexdigest()[:16] == FROZEN
    assert "\nedit_file path old new\n" in tools_prompt("2")
    assert [line.split()[0] for line in tools_prompt("2").splitlines()] == list(TOOLS_2)
    with pytest.raises(NotFoundError, match="expected one of 1, 2"):
        tools_prompt("3")


def test_a_set_of_tools_tells_its_version():
    assert prompt_for(TOOLS_2) == tools_prompt("2")
    assert prompt_for([*TOOLS_2, "more"]) is None
    assert prompt_for([]) is None


@pytest.mark.parametrize(
    ("version", "schemas"), [("1", tool_schemas("1")), ("2", tool_schemas("2"))]
)
def test_a_client_with_the_tools_of_training_gets_the_context_of_training(version, schemas):
    chat = PenstockChat(train_tokenizer([tools_prompt("2"), "Fix f in m.py"], 400))
    tools = offered_tools(version)
    trained = Conversation(chat, task(), tools, ends_on_parse_error=True).token_ids
    words = [ChatMessage(role=Role.SYSTEM, content=tools.words)] if tools.words else []
    assert trained == chat.render_prompt([*words, ChatMessage(role=Role.USER, content="Fix f")])
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "Fix f"}],
        "tools": schemas,
    }
    request = read_chat(msgspec.json.encode(body)).conversation
    assert chat.render_prompt(messages_of(request), told_tools(request)) == trained
