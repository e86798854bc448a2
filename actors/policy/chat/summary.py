"""Reads summary turns (see `actors/policy/summaries.py`)."""

from collections.abc import Sequence

import msgspec

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, ParseFailure
from penstock.actors.policy.summaries import MARK
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import Turn


class NoSummaryError(PenstockError, ValueError):
    """A turn that is not a valid summary; the text says why."""


def read_summary(
    chat: ChatFormat, token_ids: Sequence[int], context_ids: Sequence[int], tools: OfferedTools
) -> str:
    """Return the text of a summary turn that the next segment starts with.

    Raises:
        NoSummaryError: The turn is malformed, calls a tool, or has no text after the mark.

    """
    parsed = chat.parse_turn(token_ids, context_ids, tools)
    if isinstance(parsed, ParseFailure):
        raise NoSummaryError(f"{parsed.reason}: {parsed.detail}")
    if parsed.calls:
        raise NoSummaryError(f"expected no call in a summary, got {parsed.calls[0].name}")
    lines = parsed.text.splitlines()
    marked = (index for index, line in enumerate(lines) if line.lstrip().startswith(MARK))
    # Everything before the first mark is scratch space.
    first = next(marked, None)
    if first is None:
        raise NoSummaryError(f"expected a line that begins with {MARK!r}")
    kept = "\n".join([lines[first].lstrip().removeprefix(MARK), *lines[first + 1 :]]).strip()
    if not kept:
        raise NoSummaryError(f"expected words after {MARK!r}")
    return kept


def as_summary(turn: Turn, fault: str, *, is_withheld: bool) -> Turn:
    """Mark a sampled turn as a summary.

    Args:
        turn: Sampled turn.
        fault: Why the turn is not a valid summary; empty if it is.
        is_withheld: Whether the turn is kept out of training.

    """
    return msgspec.structs.replace(
        turn, calls=[], parse_error=fault, is_summary=True, is_withheld=is_withheld
    )
