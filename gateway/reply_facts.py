"""Counts that describe a reply without its content; the release gates compare them by version."""

import re
from collections import Counter
from collections.abc import Container, Sequence

from penstock.messages.gates import NUM_TOOLS_MAX, ReplyFacts
from penstock.messages.rollout import ToolCall

TOOL_CHARS_MAX = 64
"""Maximum length of a tool name in a record."""
_TAIL_CHARS = 300
"""Length of the end of a reply that is searched for a question."""
# ASCII, full-width and Arabic question marks, then closing quotes, markup or brackets.
_QUESTION = re.compile(r"[?\uff1f\u061f][\"'*_)\]]*(\s|\Z)")


def reply_facts(
    text: str,
    calls: Sequence[ToolCall],
    *,
    num_tokens: int,
    offered: Container[str],
    is_broken: bool,
) -> ReplyFacts:
    """Return the counts of one reply.

    Args:
        text: Text of the reply.
        calls: Tool calls of the reply, including calls of tools that were not offered.
        num_tokens: Number of sampled tokens.
        offered: Names of the tools that the request offers.
        is_broken: Whether the chat format failed to parse the reply.

    """
    # Only offered names are kept: an invented one could carry content into the record.
    called = Counter(call.name[:TOOL_CHARS_MAX] for call in calls if call.name in offered)
    last_paragraph = text.rstrip().rpartition("\n\n")[2][-_TAIL_CHARS:]
    return ReplyFacts(
        num_tokens=num_tokens,
        is_empty=not text.strip() and not calls,
        is_invalid=is_broken or any(call.name not in offered for call in calls),
        is_question=not calls and _QUESTION.search(last_paragraph) is not None,
        num_calls=len(calls),
        tools=dict(called.most_common(NUM_TOOLS_MAX)),
    )
