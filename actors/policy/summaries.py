"""Summaries, with which a conversation that nears its context window continues in a new context.

```
 segment 1   system, tools │ task │ turn │ ... │ results, request │ summary turn: scratch space,
                                                                    "Summary:", what to keep
 segment 2   system, tools │ task, "Summary 1:", what was kept │ turn │ ...
```
Only the text after the mark is kept; the text before it is scratch space. Rollout workers and
gateways use the same wording. Source: self-summary of Composer 2; arXiv 2607.05378.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import PositiveInt

MARK = "Summary:"
"""Start of the line with which the kept part of a summary begins."""


class SummaryMode(StrEnum):
    """Use of summaries."""

    TRAINED = "trained"
    MASKED = "masked"
    """Summaries are sampled and used, but not trained on."""
    NONE = "none"
    """No summaries are requested: the next segment begins with only the task."""


class SummaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and how summaries are requested, for tasks whose limits allow several segments."""

    mode: SummaryMode = SummaryMode.TRAINED
    """Whether summaries are trained on, masked, or not requested at all."""
    trigger: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.6
    """Fraction of the context window that must be filled before a summary is requested."""
    num_tokens_max: PositiveInt = 256
    """Maximum tokens of a summary, including scratch space."""
    request: str = (
        "Your context is nearly full and will be cleared. Think first. Then write a line that "
        f"begins with {MARK} and after it, briefly, all that you found out and did, and what is "
        "left to do."
    )
    """User message that requests a summary."""

    def __post_init__(self) -> None:
        """Check the request.

        Raises:
            ConfigError: The request is empty.

        """
        if not self.request.strip():
            raise ConfigError("rollout_worker.summary.request: expected a text, got an empty one")

    @property
    def is_asked(self) -> bool:
        """Whether summaries are requested at all."""
        return self.mode is not SummaryMode.NONE

    def is_due(self, num_tokens: int, window: int) -> bool:
        """Return whether a context of `num_tokens` is full enough for a summary."""
        return num_tokens >= self.trigger * window


def restarted(task: str, summary: str, count: int) -> str:
    """Return the first message of a segment.

    Args:
        task: First message of the first segment.
        summary: Text kept from the previous segment; empty if there is none.
        count: Number of summaries so far, including this one.

    """
    return f"{task}\n\nSummary {count}:\n{summary}" if summary else task
