"""The exported tokenizer and chat template give the ids that the run's prompts have."""

import copy
import json

import pytest

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, train_tokenizer
from penstock.envs.harness.tools import tool_schemas
from penstock.gateway.exchange.plan import messages_of, prompt_tools
from penstock.gateway.routes.chat import read_chat
from penstock.infra.export.tokenizer_files import tokenizer_files
from penstock.infra.stores.memory import MemoryStore

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
CODE = """\
class Ring:
    def push(self, value: int) -> None:
        if self.size >= self.limit:
            \tself.items[self.head] //= 2
        self.head = (self.head + 1) % self.limit

    def naïve(self):   # ünïcode, "quotes", 12345 <= 67.8e-9
        return [x ** 2 for x in range(10) if x != 3] or {'a': None}
"""
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "edit_file", "arguments": {"path": "a.py", "old": "x < y", "new": "x\n"}},
}
OTHER = {
    "id": "c2",
    "type": "function",
    "function": {"name": "deploy", "arguments": {"where": "prod", "retries": 3, "tags": ["a", 1]}},
}
DEPLOY = {
    "type": "function",
    "function": {
        "name": "deploy",
        "description": "Ship it.",
        "parameters": {"type": "object", "properties": {"where": {}, "retries": {}}},
    },
}
CONVERSATIONS = [
    [{"role": "user", "content": "Fix f"}],
    [
        {"role": "system", "content": CODE},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("two", "\n")]},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, OTHER]},
        {"role": "tool", "tool_call_id": "c1", "content": CODE},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "  done \n"},
        {"role": "developer", "content": "short, please"},
    ],
]  # fmt: skip
TOOLS = {
    "none": [],
    "harness 1": tool_schemas("1"),
    "harness 2": tool_schemas("2"),
    "one of its own": [DEPLOY],
    "mixed": [*tool_schemas("1")[:2], DEPLOY],
}


@pytest.fixture(scope="module")
def ours():
    return train_tokenizer([CODE], vocab_size=380)


@pytest.fixture
async def theirs(ours, tmp_path):
    store = MemoryStore()
    await store.put(TOKENIZER_KEY, ours.to_json().encode())
    for name, data in (await tokenizer_files(store, 2048)).files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


HTML = """if op in (">", ">=", "=="):\n    return f'<a href="{x}">{y}</a>'\n"""


@pytest.mark.parametrize(
    "text", [CODE, CODE.replace("    ", "\t"), "\r\n  x\r\n\n\n", "Ωµ🙂", "", HTML]
)
def test_indented_code_has_equal_ids(ours, theirs, text):
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == PenstockChat(ours).end_id


@pytest.mark.parametrize("tools", TOOLS.values(), ids=list(TOOLS))
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["short", "long"])
def test_the_template_renders_what_the_gateway_does(ours, theirs, messages, tools):
    given = {"tools": tools} if tools else {}
    wire = [as_sent(message) for message in messages]
    body = json.dumps({"model": "m", "messages": wire, **given}).encode()
    request = read_chat(body).conversation
    expected = PenstockChat(ours).render_prompt(messages_of(request), prompt_tools(request))
    found = theirs.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    assert list(found) == expected


def as_sent(message):
    """Arguments are JSON text on the wire."""
    sent = copy.deepcopy(message)
    for call in sent.get("tool_calls", []):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


def test_what_the_format_cannot_hold_is_refused(theirs):
    with pytest.raises(Exception, match="there is no role critic"):
        theirs.apply_chat_template([{"role": "critic", "content": "x"}])
    text = {"role": "assistant", "tool_calls": [as_sent({"tool_calls": [CALL]})["tool_calls"][0]]}
    with pytest.raises(Exception, match="arguments must be an object"):
        theirs.apply_chat_template([text])
