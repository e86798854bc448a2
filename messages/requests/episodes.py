"""Requests of the episode viewer: rows of episodes, filters, and single episodes."""

from typing import Annotated

import msgspec

from penstock.messages.base import Message
from penstock.messages.reward import Outcome
from penstock.messages.rollout import EpisodeEnd
from penstock.messages.settings import NonNegativeInt
from penstock.messages.task import Purpose

ROWS_MAX = 5_000
"""Maximum number of rows in a reply."""

PART_BYTES_MAX = 256 << 10
"""Maximum bytes per part of a reply."""

Words = Annotated[str, msgspec.Meta(max_length=256)]


class EpisodeRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Summary of an episode, known without reading its turns."""

    rollout_id: str
    group_id: str = ""
    task_id: str = ""
    category: str = ""
    source: str = ""
    purpose: Purpose = Purpose.TRAIN
    finished_at: float = 0.0
    """End of the episode in Unix seconds; 0 until it ends."""
    end: EpisodeEnd | None = None
    judge: str = ""
    """Name of the judge that gave the verdict."""
    outcome: Outcome | None = None
    """Judge's outcome; None until there is a verdict."""
    reward: float | None = None
    """Reward; None without a verdict or if the outcome has no reward."""
    num_turns: int = 0
    num_tokens: int = 0
    """Number of sampled tokens."""
    num_calls: int = 0
    version_min: int = -1
    version_max: int = -1
    """Newest policy version that sampled a token (`version_min`: oldest); -1 without tokens."""
    wall_s: float = 0.0
    num_findings: int = 0
    """Number of signs of cheating."""
    step: int = 0
    """Step whose batch manifest lists the episode; 0 if none does yet."""
    fate: Outcome | None = None
    """Outcome in that step: the judged one if trained, otherwise why it was left out."""
    advantage: float = 0.0
    label: float | None = None
    """Mean of people's labels, 0 to 1; None without labels."""
    num_labels: int = 0


class EpisodeFilter(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Filter of listed episodes; a field that is not set matches all."""

    text: Words = ""
    """Case-insensitive substring of the rollout's, group's or task's id."""
    purpose: Purpose | None = None
    outcome: Outcome | None = None
    category: Words = ""
    step: NonNegativeInt | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    turns_min: NonNegativeInt = 0
    turns_max: NonNegativeInt | None = None
    is_labeled: bool | None = None
    """Whether a person has labeled the episode."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)] = ROWS_MAX
    """Maximum number of rows; the newest are kept."""

    def keeps(self, row: EpisodeRow) -> bool:
        """Return whether a row passes the filter."""
        text = self.text.casefold()
        ids = (row.rollout_id, row.group_id, row.task_id)
        return (
            (not text or any(text in row_id.casefold() for row_id in ids))
            and self.purpose in {None, row.purpose}
            and self.outcome in {None, row.outcome}
            and self.category in {"", row.category}
            and self.step in {None, row.step}
            and self.turns_min <= row.num_turns
            and (self.turns_max is None or row.num_turns <= self.turns_max)
            and self.is_labeled in {None, row.label is not None}
            and self._has_reward(row.reward)
        )

    def _has_reward(self, reward: float | None) -> bool:
        low, high = self.reward_min, self.reward_max
        if reward is None:
            # An episode without a reward is outside any range, but passes when no range is set.
            return low is None and high is None
        return (low is None or low <= reward) and (high is None or reward <= high)


class ListEpisodes(Message, frozen=True, kw_only=True):
    """Gateway -> monitor: list episodes; answered by `EpisodePart`s of a JSON list of rows."""

    wanted: EpisodeFilter


class ReadEpisode(Message, frozen=True, kw_only=True):
    """Gateway -> monitor: read an episode; answered by `EpisodePart`s of a JSON `EpisodeView`."""

    rollout_id: str


class EpisodePart(Message, frozen=True, kw_only=True):
    """Monitor -> gateway: next bytes of a reply, at most `PART_BYTES_MAX`."""

    data: bytes
