"""Chains in a published model's format, whose turns reason before they call."""

import pytest
from tests.outside_model import qwen_tokenizer

from penstock.actors.policy.chat.format import ChatMessage, OfferedTools, Role
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.chat.summary import NoSummaryError, read_summary
from penstock.envs.harness.tools import functions_of
from penstock.messages.rollout import ToolCall

TOOLS = OfferedTools(schemas=functions_of("1"))
CALL = ToolCall(name="read_file", arguments={"path": "a.py"})
REASONING = "<think>\nlook first\n</think>\n\n"


def special(chat, text: str) -> list[int]:
    """Encode text whose reasoning marks are the format's own."""
    ids = []
    for index, part in enumerate(text.replace("</think>", "<think>").split("<think>")):
        mark = ["<think>", "</think>"][(index - 1) % 2]
        ids += ([chat.tokenizer.special_id(mark)] if index else []) + chat.tokenizer.encode(part)
    return ids


@pytest.mark.parametrize("reasoning", ["", REASONING])
def test_a_summary_is_asked_for_after_all_that_was_sampled(reasoning):
    chat = open_chat("renderers:qwen3", qwen_tokenizer())
    prompt = chat.render_prompt([ChatMessage(role=Role.USER, content="Fix f")], TOOLS)
    turn = special(chat, reasoning) + chat.render_turn("", [CALL], TOOLS)
    results = [(CALL.name, "x = 1")]
    seen = chat.render_observation(prompt, turn, results, TOOLS)
    asked = chat.render_observation(prompt, turn, results, TOOLS, "Sum up <|im_end|>.")
    text = chat.tokenizer.decode(asked)
    assert seen is not None and "x = 1" in text and text.index("x = 1") < text.index("Sum up")
    ends = [chat.tokenizer.special_of(one) for one in asked].count("<|im_end|>")
    assert ends == [chat.tokenizer.special_of(one) for one in seen].count("<|im_end|>") + 1
    said = special(chat, reasoning) + chat.tokenizer.encode("Summary: a is 1\nleft: b")
    said.append(chat.stop_ids[0])
    assert read_summary(chat, said, asked, TOOLS) == "a is 1\nleft: b"
    with pytest.raises(NoSummaryError, match="expected no call"):
        read_summary(chat, chat.render_turn("Summary: x", [CALL], TOOLS), asked, TOOLS)
