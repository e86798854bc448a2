"""From a conversation to the policy's context.

What the policy sampled is not tokenized again where it can be helped: the ids of its replies are
remembered, and a conversation that comes back holds them as they were sampled, whatever route it
comes by. So a session's next turn begins with exactly the tokens of the last one, and its KV prefix
is still good.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.format import ChatMessage, OfferedTools, Role
from penstock.envs.harness.versions import prompt_for
from penstock.gateway.conversation import Call, LiveRequest, Said, Tool
from penstock.gateway.errors import invalid
from penstock.messages.rollout import ToolCall

NUM_REMEMBERED_MAX = 16_384
NUM_TOKENS_REMEMBERED_MAX = 4 << 20
_Reply = tuple[str, str, str]


class ReplyMemory:
    """The sampled ids of recent replies, by session, content and calls."""

    def __init__(
        self,
        num_max: int = NUM_REMEMBERED_MAX,
        num_tokens_max: int = NUM_TOKENS_REMEMBERED_MAX,
    ) -> None:
        self._num_max = num_max
        self._num_tokens_max = num_tokens_max
        self._num_tokens = 0
        self._ids: OrderedDict[_Reply, array[int]] = OrderedDict()

    def put(
        self, session_id: str, text: str, calls: Sequence[ToolCall], token_ids: Sequence[int]
    ) -> None:
        """Remember one reply, its calls as the client has them; the oldest is forgotten."""
        key = _reply_key(session_id, text, calls)
        self._num_tokens += len(token_ids) - len(self._ids.pop(key, ()))
        self._ids[key] = array("i", token_ids)
        while len(self._ids) > self._num_max or self._num_tokens > self._num_tokens_max:
            self._num_tokens -= len(self._ids.popitem(last=False)[1])

    def get(self, session_id: str, text: str, calls: Sequence[ToolCall]) -> list[int] | None:
        """Return the ids of a reply, or None."""
        ids = self._ids.get(_reply_key(session_id, text, calls))
        return None if ids is None else ids.tolist()


def sent_call(call: ToolCall, tools: Mapping[str, Tool]) -> Call:
    """Return a call as its client gets it, in the types of its tool's schema."""
    return Call(name=call.name, arguments=tools[call.name].typed(call))


def messages_of(conversation: LiveRequest) -> list[ChatMessage]:
    """Return the messages as a chat format takes them: the results of calls in the calls' order.

    Raises:
        ApiError: 400, a result answers no call.

    """
    messages: list[ChatMessage] = []
    said = conversation.messages
    index = 0
    while index < len(said):
        message = said[index]
        calls = tuple(call.made for call in message.calls)
        messages.append(ChatMessage(role=message.role, content=message.text, calls=calls))
        index += 1
        end = index
        while end < len(said) and said[end].role is Role.TOOL:
            end += 1
        messages += _results(message, said[index:end])
        index = end
    return messages


def remembered(
    messages: Sequence[ChatMessage], session_id: str, memory: ReplyMemory
) -> dict[int, list[int]]:
    """Return the ids of the session's replies among the messages, by index."""
    found: dict[int, list[int]] = {}
    for index, message in enumerate(messages):
        if message.role is Role.ASSISTANT:
            ids = memory.get(session_id, message.content, message.calls)
            if ids is not None:
                found[index] = ids
    return found


def told_tools(conversation: LiveRequest) -> OfferedTools:
    """Return what a prompt holds of the tools.

    A client that offers all tools of one version of the harness gets the very words of training.
    Else only tools without a special token of their own need a description.
    """
    offered = conversation.offered
    text = prompt_for(offered)
    if text is None:
        further = [tool for tool in offered.values() if not _is_built_in(tool)]
        lines = [_describe(tool) for tool in further]
        text = "Further tools:\n" + "\n".join(lines) if lines else ""
    return OfferedTools(words=text, schemas=[tool.schema for tool in offered.values()])


def _results(caller: Said, results: Sequence[Said]) -> list[ChatMessage]:
    """Return a turn's results in the order of its calls; those that name no call keep theirs."""
    places = {call.call_id: index for index, call in enumerate(caller.calls) if call.call_id}
    found: dict[int, Said] = {}
    for index, result in enumerate(results):
        place = index
        if places and result.call_id:
            if result.call_id not in places:
                text = f"the turn before it makes no call {result.call_id!r}"
                raise invalid(text, f"{result.place}.tool_call_id")
            place = places[result.call_id]
        if place in found:
            raise invalid("the call has a result already", f"{result.place}.tool_call_id")
        found[place] = result
    ordered = [found[place] for place in sorted(found)]
    return [ChatMessage(role=Role.TOOL, content=result.text) for result in ordered]


def _describe(tool: Tool) -> str:
    names = ", ".join(tool.properties)
    return f"{tool.name}({names}): {tool.description}"


def _is_built_in(tool: Tool) -> bool:
    return tool.name in special_tokens.TOOL_NAMES


def _reply_key(session_id: str, text: str, calls: Sequence[ToolCall]) -> _Reply:
    plain = [(call.name, sorted(call.arguments.items())) for call in calls]
    return session_id, text, msgspec.json.encode(plain).decode()
