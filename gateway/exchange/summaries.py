"""Summaries of sessions that outgrow the context window, and the messages that they cover.

```
 client sends   system │ task │ reply │ results │ reply │ results │ reply │ results
 policy reads   system │ task, "Summary 1:" ...                   │ reply │ results
```
The client keeps sending all messages; those that a summary covers are left out of the prompt, as
long as they come back unchanged. Summaries are kept in memory, up to a bound: a gateway that does
not know a session summarizes it again.
"""

from collections.abc import Sequence

import msgspec

from penstock.actors.policy.chat.format import Role
from penstock.actors.policy.summaries import restarted
from penstock.actors.runtime.fair_table import FairTable
from penstock.gateway.conversation import (
    ChoiceMode,
    LiveRequest,
    RequestMessage,
    ResponseFormat,
    ToolChoice,
)
from penstock.gateway.exchange.sessions import NUM_SESSIONS_MAX, Thread, UserKey

SessionKey = tuple[UserKey, str]


class SummaryCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """A summary, and the messages of the session that it replaces."""

    num_messages: int = 0
    """Number of messages replaced, counted from the first that the client sends."""
    digest: bytes = b""
    """Digest of these messages (`Thread.digest`)."""
    summary: str = ""
    count: int = 0
    """Number of summaries that the session has had."""
    chain: str = ""
    """Chain of the session's records (`InferenceRecorded.chain`)."""


class Summaries:
    """The newest summary of each recent session."""

    def __init__(self) -> None:
        self._covered: FairTable[SessionKey, SummaryCoverage] = FairTable(
            NUM_SESSIONS_MAX, lambda key, _: key[0][0]
        )

    def put(self, key: SessionKey, covered: SummaryCoverage) -> None:
        """Remember a summary; beyond the bound, one of the tenant with the most is forgotten."""
        self._covered[key] = covered

    def forget(self, owner: UserKey) -> None:
        """Forget the summaries of a user's sessions."""
        for key in [key for key in self._covered if key[0] == owner]:
            del self._covered[key]

    def get(self, key: SessionKey, messages: Sequence[RequestMessage]) -> SummaryCoverage:
        """Return the summary of a session if it applies to its messages; otherwise an empty one."""
        covered = self._covered.get(key)
        if covered is None:
            return SummaryCoverage()
        self._covered[key] = covered
        # A client may edit its history: a summary of other messages must not replace these.
        first = messages[: covered.num_messages]
        if len(first) < covered.num_messages or Thread(key[0], first).digest != covered.digest:
            return SummaryCoverage()
        return covered


def shortened(conversation: LiveRequest, covered: SummaryCoverage) -> LiveRequest:
    """Return a conversation with the summary in place of the messages that it covers."""
    if not covered.count:
        return conversation
    sent = conversation.messages
    # The task stays word for word: summaries of summaries would lose it.
    task = next(message.text for message in sent if message.role is Role.USER)
    text = restarted(task, covered.summary, covered.count)
    opening = RequestMessage(role=Role.USER, text=text)
    messages = (*_system(sent, covered), opening, *sent[covered.num_messages :])
    return msgspec.structs.replace(conversation, messages=messages)


def ends(conversation: LiveRequest, covered: SummaryCoverage) -> list[int]:
    """Return the numbers of messages after which a summary may be requested, in order.

    A summary ends with a complete turn: a reply without calls, or the last result of its calls.
    Messages that are covered already do not count.
    """
    sent = conversation.messages
    # `shortened` repeats the first user message as the task.
    if not any(message.role is Role.USER for message in sent):
        return []
    found: list[int] = []
    for index in range(covered.num_messages + 1, len(sent) + 1):
        last = sent[index - 1]
        is_complete = last.role is Role.TOOL or (last.role is Role.ASSISTANT and not last.calls)
        has_more_results = index < len(sent) and sent[index].role is Role.TOOL
        if is_complete and not has_more_results:
            found.append(index)
    return found


def asking(
    conversation: LiveRequest,
    covered: SummaryCoverage,
    end: int,
    instruction: str,
    num_tokens_max: int,
) -> LiveRequest:
    """Return the request for a summary of the first `end` messages.

    Args:
        conversation: Request whose session is summarized.
        covered: Summary so far.
        end: Number of messages to summarize, one of `ends`.
        instruction: Text that asks for the summary.
        num_tokens_max: Maximum length of the summary in tokens.

    """
    first = conversation.messages[:end]
    short = shortened(msgspec.structs.replace(conversation, messages=first), covered)
    # The client's limits on the form of its reply do not apply to a summary.
    sampling = msgspec.structs.replace(
        conversation.sampling,
        num_tokens_max=num_tokens_max,
        stops=(),
        stop_token_ids=(),
        ignores_end=False,
    )
    is_required = conversation.tool_choice.mode is ChoiceMode.REQUIRED
    # The same tools in the prompt, so that the KV cache of the session applies.
    return msgspec.structs.replace(
        short,
        messages=(*short.messages, RequestMessage(role=Role.USER, text=instruction)),
        tools=tuple(msgspec.structs.replace(t, is_strict=False) for t in conversation.tools),
        tool_choice=ToolChoice() if is_required else conversation.tool_choice,
        allows_parallel_calls=True,
        response_format=ResponseFormat(),
        sampling=sampling,
        num_choices=1,
        num_top_logprobs=0,
    )


def _system(messages: Sequence[RequestMessage], covered: SummaryCoverage) -> list[RequestMessage]:
    first = messages[: covered.num_messages]
    return [message for message in first if message.role is Role.SYSTEM]
