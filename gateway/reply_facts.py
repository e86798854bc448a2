"""What guards need to know of a reply, without its content."""

import re
from collections import Counter
from collections.abc import Container, Sequence

from penstock.messages.gates import NUM_TOOLS_MAX, ReplyFacts
from penstock.messages.rollout import ToolCall

TOOL_CHARS_MAX = 64
_TAIL_CHARS = 300
_ASKS = re.compile(r"[?\uff1f\u061f][\"'*_)\]]*(\s|\Z)")


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
        text: its content.
        calls: what it calls, whether or not it was offered.
        num_tokens: sampled.
        offered: names of the tools that the request offers.
        is_broken: whether the chat format could not parse it.

    """
    called = Counter(call.name[:TOOL_CHARS_MAX] for call in calls if call.name in offered)
    last_paragraph = text.rstrip().rpartition("\n\n")[2][-_TAIL_CHARS:]
    return ReplyFacts(
        num_tokens=num_tokens,
        is_empty=not text.strip() and not calls,
        is_invalid=is_broken or any(call.name not in offered for call in calls),
        is_question=not calls and _ASKS.search(last_paragraph) is not None,
        num_calls=len(calls),
        tools=dict(called.most_common(NUM_TOOLS_MAX)),
    )
