"""Summaries: how a conversation that nears its window goes on in a new context.

```
 segment 1   system, tools │ task │ turn │ ... │ results, request │ summary turn: scratch space,
                                                                    "Summary:", what to keep
 segment 2   system, tools │ task, "Summary 1:", what was kept │ turn │ ...
```
Only what follows the mark is carried over; what comes before it is scratch space. Rollout workers
and gateways use the same words. Source: self-summary of Composer 2; arXiv 2607.05378.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import PositiveInt

MARK = "Summary:"
"""Begins the line from which on a summary is carried over."""


class SummaryMode(StrEnum):
    """What becomes of summaries."""

    TRAINED = "trained"
    MASKED = "masked"
    """Sampled and read, and not trained."""
    NONE = "none"
    """None is asked for: the next segment begins with the task alone."""


class SummaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and how a summary is asked for, where a task's limits allow several segments."""

    mode: SummaryMode = SummaryMode.TRAINED
    trigger: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.6
    """Share of the window: once a context fills it so far, a summary is asked for."""
    num_tokens_max: PositiveInt = 256
    """Of a summary, scratch space included."""
    request: str = (
        "Your context is nearly full and will be cleared. Think first. Then write a line that "
        f"begins with {MARK} and after it, briefly, all that you found out and did, and what is "
        "left to do."
    )
    """What asks for it, as a user's message."""

    def __post_init__(self) -> None:
        """Check the request.

        Raises:
            ConfigError: It is empty.

        """
        if not self.request.strip():
            raise ConfigError("rollout_worker.summary.request: expected words, got none")

    @property
    def is_asked(self) -> bool:
        """Whether summaries are asked for at all."""
        return self.mode is not SummaryMode.NONE

    def is_due(self, num_tokens: int, window: int) -> bool:
        """Return whether a context of so many tokens is to be closed."""
        return num_tokens >= self.trigger * window


def restarted(task: str, summary: str, count: int) -> str:
    """Return the message that a segment begins with.

    Args:
        task: As the first segment's.
        summary: What is carried over; empty without one.
        count: Summaries so far, this one included.

    """
    return f"{task}\n\nSummary {count}:\n{summary}" if summary else task
