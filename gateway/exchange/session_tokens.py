"""Converts an external session to tokens: one context, then the turns and what came between them.

The chat format renders the texts turn by turn, as in an episode. The tokens that the other service
really sampled, and their logprobs, are unknown.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.actors.policy.chat.format import (
    ChatFormat,
    ChatMessage,
    OfferedTools,
    Role,
    UnrenderableError,
)
from penstock.gateway.conversation import RequestMessage
from penstock.gateway.errors import invalid

NUM_TURNS_MAX = 256
"""Maximum assistant turns in one session."""


class SessionTokens(NamedTuple):
    """A session in token ids."""

    context_ids: list[int]
    """Tokens before the first assistant turn."""
    reply_ids: list[int]
    """Assistant turns, with tool results and user messages between them."""
    between: list[tuple[int, int]]
    """Spans [start, end) of `reply_ids` that the assistant did not write."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole session."""
        return len(self.context_ids) + len(self.reply_ids)


def check_session(messages: Sequence[RequestMessage]) -> int:
    """Check the order of the messages; return the number of assistant turns.

    Raises:
        ApiError: 400, the messages are in an order that no session can have.

    """
    turns = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
    if not turns or turns[-1] != len(messages) - 1:
        raise invalid("expected an assistant message at the end", "messages")
    if turns[0] == 0:
        raise invalid("expected a user message before it", messages[0].place)
    if len(turns) > NUM_TURNS_MAX:
        raise invalid(f"expected at most {NUM_TURNS_MAX} assistant messages", "messages")
    if any(message.role is Role.TOOL for message in messages[: turns[0]]):
        raise invalid("expected a call before its tool result", "messages")
    for start, end in pairwise(turns):
        num_calls, after = len(messages[start].calls), messages[start + 1 : end]
        roles = [message.role for message in after]
        results = [Role.TOOL] * num_calls
        if roles != [*results, Role.USER] and (roles != results or not results):
            follows = f"the results of its {num_calls} calls, then " if num_calls else ""
            text = f"expected {follows}at most one user message before the next assistant message"
            raise invalid(text, messages[start].place)
    return len(turns)


def session_tokens(
    chat: ChatFormat,
    messages: Sequence[ChatMessage],
    tools: OfferedTools,
    tokens_max: int,
    malformed: Collection[int] = (),
) -> SessionTokens:
    """Render a session that `check_session` accepts.

    Rendering stops after the turn that exceeds `tokens_max`, so the result may be incomplete then.

    Args:
        chat: Chat format of the policy.
        messages: Messages of the session.
        tools: Tools that the assistant could call.
        tokens_max: Maximum length of the session.
        malformed: Indices of assistant messages with calls whose arguments could not be read. They
            count as text between turns, since their rendering is not what the assistant wrote.

    Raises:
        UnrenderableError: The chat format cannot render the conversation, or it changes earlier
            turns in it.

    """
    turns = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
    context = chat.render_prompt(messages[: turns[0]], tools)
    found = SessionTokens(context, [], [])
    for index, following in pairwise([*turns, len(messages)]):
        message = messages[index]
        before = [*context, *found.reply_ids]
        turn = chat.render_turn(message.content, message.calls, tools)
        if index in malformed:
            found.between.append((len(found.reply_ids), len(found.reply_ids) + len(turn)))
        found.reply_ids.extend(turn)
        # The caller refuses the session anyway: do not spend a thread on the rest.
        if following == len(messages) or found.num_tokens > tokens_max:
            break
        after = messages[index + 1 : following]
        results = [
            (call.name, result.content)
            for call, result in zip(message.calls, after[: len(message.calls)], strict=True)
        ]
        request = after[-1].content if after[-1].role is Role.USER else ""
        observed = chat.render_observation(before, turn, results, tools, request)
        # None means that the format renders earlier turns differently now: no single sequence of
        # tokens stands for the session.
        if observed is None:
            text = "the chat format changes earlier turns here: submit the parts one by one"
            raise UnrenderableError(text)
        found.between.append((len(found.reply_ids), len(found.reply_ids) + len(observed)))
        found.reply_ids.extend(observed)
    return found
