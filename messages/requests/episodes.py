"""Single episodes of a run: their rows, which of them a viewer asks for, and the requests."""

from typing import Annotated

import msgspec

from penstock.messages.base import Message
from penstock.messages.reward import Outcome
from penstock.messages.rollout import EpisodeEnd
from penstock.messages.settings import NonNegativeInt
from penstock.messages.task import Purpose

ROWS_MAX = 5_000
"""Most rows that a filter returns."""

PART_BYTES_MAX = 256 << 10

Words = Annotated[str, msgspec.Meta(max_length=256)]


class EpisodeRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is known of an episode without reading its turns."""

    rollout_id: str
    group_id: str = ""
    task_id: str = ""
    category: str = ""
    source: str = ""
    purpose: Purpose = Purpose.TRAIN
    finished_at: float = 0.0
    """Unix seconds; 0 until it ends."""
    end: EpisodeEnd | None = None
    judge: str = ""
    """Who gave the verdict."""
    outcome: Outcome | None = None
    """Of the judge; None until there is a verdict."""
    reward: float | None = None
    """None where there is none: no verdict yet, or an outcome that has no reward."""
    num_turns: int = 0
    num_tokens: int = 0
    """Sampled."""
    num_calls: int = 0
    version_min: int = -1
    version_max: int = -1
    """Oldest and newest policy versions that drew a token; -1 where there is no token."""
    wall_s: float = 0.0
    num_findings: int = 0
    """Signs of cheating."""
    step: int = 0
    """The step that took it in or left it out; 0 while none has."""
    fate: Outcome | None = None
    """What became of it in that step: trained as judged, or left out, and why."""
    advantage: float = 0.0
    label: float | None = None
    """Mean of what people say of it, 0 to 1; None where nobody has."""
    num_labels: int = 0


class EpisodeFilter(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Which episodes to list; a field that is left out keeps all."""

    text: Words = ""
    """Part of the rollout's, group's or task's id, in any case."""
    purpose: Purpose | None = None
    outcome: Outcome | None = None
    category: Words = ""
    step: NonNegativeInt | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    turns_min: NonNegativeInt = 0
    turns_max: NonNegativeInt | None = None
    is_labeled: bool | None = None
    """Whether a person has said something of it."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)] = ROWS_MAX
    """The newest ones."""

    def keeps(self, row: EpisodeRow) -> bool:
        """Return whether a row passes."""
        words = self.text.casefold()
        ids = (row.rollout_id, row.group_id, row.task_id)
        return (
            (not words or any(words in each.casefold() for each in ids))
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
            return low is None and high is None
        return (low is None or low <= reward) and (high is None or reward <= high)


class ListEpisodes(Message, frozen=True, kw_only=True):
    """Gateway -> monitor: the rows that a filter keeps; `EpisodePart`s of a JSON list of them."""

    wanted: EpisodeFilter


class ReadEpisode(Message, frozen=True, kw_only=True):
    """Gateway -> monitor: one episode; `EpisodePart`s of the JSON of an `EpisodeView`."""

    rollout_id: str


class EpisodePart(Message, frozen=True, kw_only=True):
    """Monitor -> gateway: the next bytes of a reply, at most `PART_BYTES_MAX`."""

    data: bytes
