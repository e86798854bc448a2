"""An external session as tokens: one context, then the assistant's turns and what came between.

Tokens are what the chat format makes of the texts, turn by turn as in an episode. Which tokens were
sampled where the session took place, and how probable they were, nobody knows.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.actors.policy.chat.format import (
    ChatFormat,
    ChatMessage,
    OfferedTools,
    Role,
    UnrenderableError,
)
from penstock.gateway.conversation import Said
from penstock.gateway.errors import invalid

NUM_TURNS_MAX = 256
"""Of the assistant, in one session."""


class SessionTokens(NamedTuple):
    """A session in token ids."""

    context_ids: list[int]
    """What came before the assistant's first turn."""
    reply_ids: list[int]
    """Its turns, and between them results of tools and what the user said."""
    between: list[tuple[int, int]]
    """Spans [start, end) of `reply_ids` that are not the assistant's."""

    @property
    def num_tokens(self) -> int:
        """Of the whole session."""
        return len(self.context_ids) + len(self.reply_ids)


def check_session(said: Sequence[Said]) -> int:
    """Return the number of the assistant's turns.

    Raises:
        ApiError: 400, the messages are in an order that no session has.

    """
    turns = [index for index, one in enumerate(said) if one.role is Role.ASSISTANT]
    if not turns or turns[-1] != len(said) - 1:
        raise invalid("expected an assistant's message at the end", "messages")
    if turns[0] == 0:
        raise invalid("expected the assistant's task before it", said[0].place)
    if len(turns) > NUM_TURNS_MAX:
        raise invalid(f"expected at most {NUM_TURNS_MAX} of an assistant", "messages")
    if any(one.role is Role.TOOL for one in said[: turns[0]]):
        raise invalid("a tool's result without a call before it", "messages")
    for start, end in pairwise(turns):
        num_calls, after = len(said[start].calls), said[start + 1 : end]
        roles = [one.role for one in after]
        results = [Role.TOOL] * num_calls
        if roles != [*results, Role.USER] and (roles != results or not results):
            follows = f"the results of its {num_calls} calls, then " if num_calls else ""
            text = f"expected {follows}at most one message of the user before the next turn"
            raise invalid(text, said[start].place)
    return len(turns)


def session_tokens(
    chat: ChatFormat, messages: Sequence[ChatMessage], tools: OfferedTools, tokens_max: int
) -> SessionTokens:
    """Render a session that `check_session` accepts.

    Stops after the turn with which it has more than `tokens_max` tokens.

    Raises:
        UnrenderableError: The format has no such conversation, or changes earlier turns in it.

    """
    turns = [index for index, one in enumerate(messages) if one.role is Role.ASSISTANT]
    context = chat.render_prompt(messages[: turns[0]], tools)
    found = SessionTokens(context, [], [])
    for index, following in pairwise([*turns, len(messages)]):
        made = messages[index]
        before = [*context, *found.reply_ids]
        turn = chat.render_turn(made.content, made.calls, tools)
        found.reply_ids.extend(turn)
        if following == len(messages) or found.num_tokens > tokens_max:
            break
        after = messages[index + 1 : following]
        results = [
            (call.name, result.content)
            for call, result in zip(made.calls, after[: len(made.calls)], strict=True)
        ]
        request = after[-1].content if after[-1].role is Role.USER else ""
        observed = chat.render_observation(before, turn, results, tools, request)
        if observed is None:
            text = "the chat format changes earlier turns here: submit the parts one by one"
            raise UnrenderableError(text)
        found.between.append((len(found.reply_ids), len(found.reply_ids) + len(observed)))
        found.reply_ids.extend(observed)
    return found
