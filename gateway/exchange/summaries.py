"""Sessions that outgrow the window: what their first messages became, and which may be summed up.

```
 client sends   system │ task │ reply │ results │ reply │ results │ reply │ results
 policy reads   system │ task, "Summary 1:" ...                   │ reply │ results
```
The client goes on sending all messages; those that a summary covers are left out as long as they
come back alike. Bounded, and in memory: a gateway that does not know a session sums it up again.
"""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from penstock.actors.policy.chat.format import Role
from penstock.actors.policy.summaries import restarted
from penstock.gateway.conversation import (
    ChoiceMode,
    LiveRequest,
    ResponseFormat,
    Said,
    ToolChoice,
)
from penstock.gateway.exchange.sessions import NUM_SESSIONS_MAX, Thread, UserKey

SessionKey = tuple[UserKey, str]


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a session that a summary stands for."""

    num_messages: int = 0
    """Of those that the client sends."""
    digest: bytes = b""
    """Of these messages (`Thread.digest`)."""
    summary: str = ""
    count: int = 0
    """Summaries of the session so far."""
    chain: str = ""
    """`InferenceRecorded.chain` of the session's requests."""


class Summaries:
    """The newest summary of each recent session."""

    def __init__(self) -> None:
        self._covered: OrderedDict[SessionKey, Covered] = OrderedDict()

    def put(self, key: SessionKey, covered: Covered) -> None:
        """Remember a summary; the session used longest ago is forgotten."""
        self._covered[key] = covered
        self._covered.move_to_end(key)
        if len(self._covered) > NUM_SESSIONS_MAX:
            self._covered.popitem(last=False)

    def get(self, key: SessionKey, messages: Sequence[Said]) -> Covered:
        """Return what a session's summary covers of its messages; of others it covers none."""
        covered = self._covered.get(key, Covered())
        if key in self._covered:
            self._covered.move_to_end(key)
        first = messages[: covered.num_messages]
        if len(first) < covered.num_messages or Thread(key[0], first).digest != covered.digest:
            return Covered()
        return covered


def shortened(conversation: LiveRequest, covered: Covered) -> LiveRequest:
    """Return a conversation with the covered messages' summary in their place."""
    if not covered.count:
        return conversation
    said = conversation.messages
    task = next(message.text for message in said if message.role is Role.USER)
    text = restarted(task, covered.summary, covered.count)
    opening = Said(role=Role.USER, text=text)
    messages = (*_system(said, covered), opening, *said[covered.num_messages :])
    return msgspec.structs.replace(conversation, messages=messages)


def ends(conversation: LiveRequest, covered: Covered) -> list[int]:
    """Return after how many messages a summary may be asked for.

    That is where a reply, or the last result of its calls, is the last message: what a user says
    after it stays as it is. Only messages that are not covered yet count.
    """
    said = conversation.messages
    if not any(message.role is Role.USER for message in said):
        return []
    found: list[int] = []
    for index in range(covered.num_messages + 1, len(said) + 1):
        last = said[index - 1]
        is_whole = last.role is Role.TOOL or (last.role is Role.ASSISTANT and not last.calls)
        is_followed = index < len(said) and said[index].role is Role.TOOL
        if is_whole and not is_followed:
            found.append(index)
    return found


def asking(
    conversation: LiveRequest, covered: Covered, end: int, words: str, num_tokens_max: int
) -> LiveRequest:
    """Return the request for a summary of the first messages, with the same tools in its prompt."""
    said = conversation.messages[:end]
    short = shortened(msgspec.structs.replace(conversation, messages=said), covered)
    wishes = msgspec.structs.replace(
        conversation.sampling,
        num_tokens_max=num_tokens_max,
        stops=(),
        stop_token_ids=(),
        ignores_end=False,
    )
    is_required = conversation.tool_choice.mode is ChoiceMode.REQUIRED
    return msgspec.structs.replace(
        short,
        messages=(*short.messages, Said(role=Role.USER, text=words)),
        tools=tuple(msgspec.structs.replace(t, is_strict=False) for t in conversation.tools),
        tool_choice=ToolChoice() if is_required else conversation.tool_choice,
        allows_parallel_calls=True,
        response_format=ResponseFormat(),
        sampling=wishes,
        num_choices=1,
        num_top_logprobs=0,
    )


def _system(said: Sequence[Said], covered: Covered) -> list[Said]:
    first = said[: covered.num_messages]
    return [message for message in first if message.role is Role.SYSTEM]
