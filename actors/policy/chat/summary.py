"""Summary turns: what they carry over, or why they are none (`actors/policy/summaries.py`)."""

from collections.abc import Sequence

import msgspec

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, ParseFailure
from penstock.actors.policy.summaries import MARK
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import Turn


class NoSummaryError(PenstockError, ValueError):
    """A turn that is no summary; the text says why."""


def read_summary(
    chat: ChatFormat, token_ids: Sequence[int], context_ids: Sequence[int], tools: OfferedTools
) -> str:
    """Return what a summary turn carries over.

    Raises:
        NoSummaryError: It is not well-formed, calls a tool, or carries nothing over.

    """
    parsed = chat.parse_turn(token_ids, context_ids, tools)
    if isinstance(parsed, ParseFailure):
        raise NoSummaryError(f"{parsed.reason}: {parsed.detail}")
    if parsed.calls:
        raise NoSummaryError(f"expected no call in a summary, got {parsed.calls[0].name}")
    lines = parsed.text.splitlines()
    marked = (index for index, line in enumerate(lines) if line.lstrip().startswith(MARK))
    first = next(marked, None)
    if first is None:
        raise NoSummaryError(f"expected a line that begins with {MARK!r}")
    kept = "\n".join([lines[first].lstrip().removeprefix(MARK), *lines[first + 1 :]]).strip()
    if not kept:
        raise NoSummaryError(f"expected words after {MARK!r}")
    return kept


def as_summary(turn: Turn, fault: str, *, is_withheld: bool) -> Turn:
    """Return a sampled turn as a summary; `fault` says why it is none, or is empty."""
    return msgspec.structs.replace(
        turn, calls=[], parse_error=fault, is_summary=True, is_withheld=is_withheld
    )
