"""The prompt's words on tools: frozen by version, equal in training and in production."""

import hashlib

import msgspec
import pytest

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatMessage, Role
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.actors.rollout_worker.conversation import Conversation, offered_tools
from penstock.envs.harness import HARNESS_VERSIONS
from penstock.envs.harness.tools import TOOLS_2, prompt_for, tool_schemas, tools_prompt
from penstock.gateway.exchange.plan import messages_of, prompt_tools
from penstock.gateway.routes.chat import read_chat
from penstock.messages.errors import NotFoundError
from penstock.messages.task import Split, Task

FROZEN = {
    "1": "e3b0c44298fc1c14",
    "2": "2eb7a296bea40d56",
}
"""Digest of each version's words, which recorded episodes depend on: entries are added, and never
changed."""


def task() -> Task:
    return Task(task_id="t", category="r", split=Split.TRAIN, instruction="Fix f", files={})


@pytest.mark.parametrize("version", HARNESS_VERSIONS)
def test_the_words_of_a_version_never_change(version):
    words = tools_prompt(version)
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    assert digest == FROZEN.get(version), f"version {version} has the words {words!r}"


def test_a_prompt_has_a_line_for_each_tool():
    assert tools_prompt("1") == ""
    assert "\nedit_file path old new\n" in tools_prompt("2")
    assert [line.split()[0] for line in tools_prompt("2").splitlines()] == list(TOOLS_2)
    with pytest.raises(NotFoundError, match="expected one of 1, 2"):
        tools_prompt("0")


def test_a_set_of_tools_tells_its_version():
    assert prompt_for(TOOLS_2) == tools_prompt("2")
    assert prompt_for([*TOOLS_2, "more"]) is None
    assert prompt_for([]) is None


@pytest.mark.parametrize("version", HARNESS_VERSIONS)
def test_a_client_with_the_tools_of_training_gets_the_context_of_training(version):
    chat = PenstockChat(train_tokenizer([tools_prompt("2"), "Fix f in m.py"], 400))
    tools = offered_tools(version)
    trained = Conversation(chat, task(), tools, ends_on_parse_error=True).token_ids
    words = [ChatMessage(role=Role.SYSTEM, content=tools.words)] if tools.words else []
    assert trained == chat.render_prompt([*words, ChatMessage(role=Role.USER, content="Fix f")])
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "Fix f"}],
        "tools": tool_schemas(version),
    }
    request = read_chat(msgspec.json.encode(body)).conversation
    assert chat.render_prompt(messages_of(request), prompt_tools(request)) == trained
