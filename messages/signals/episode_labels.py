"""What people say of a run's episodes, which judges are compared with.

Episodes are attempts at tasks, never requests of users: what users say of theirs is feedback.
"""

from typing import Annotated, ClassVar

import msgspec

from penstock.messages.base import Event, Stream

COMMENT_CHARS_MAX = 2_000
LABELERS_MAX = 64
"""Of one episode, that are shown: the latest ones."""

LabelValue = Annotated[float, msgspec.Meta(ge=0, le=1)]
Comment = Annotated[str, msgspec.Meta(max_length=COMMENT_CHARS_MAX)]
Labeler = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class EpisodeLabeled(Event, frozen=True, kw_only=True):
    """Gateway, `penstock label` -> monitor, judges' calibration: what a person says of an episode.

    Of one labeler's labels of an episode the latest counts.
    """

    stream: ClassVar[Stream] = Stream.REWARDS
    rollout_id: str
    group_id: str
    label_id: str
    """One token, drawn at random."""
    labeler: Labeler
    value: LabelValue | None = None
    """From 0, bad, to 1, good; None takes the label back."""
    comment: Comment = ""

    def key(self) -> str:
        """One per label."""
        return f"{self.rollout_id}.{self.label_id}"


class EpisodeLabels:
    """The labels that count, by episode; a fold."""

    def __init__(self) -> None:
        self._labels: dict[str, dict[str, EpisodeLabeled]] = {}

    def add(self, event: EpisodeLabeled) -> None:
        """Take the next event of the log."""
        labels = self._labels.setdefault(event.rollout_id, {})
        labels.pop(event.labeler, None)
        if event.value is not None:
            labels[event.labeler] = event
        while len(labels) > LABELERS_MAX:
            del labels[next(iter(labels))]
        if not labels:
            del self._labels[event.rollout_id]

    def forget(self, rollout_id: str) -> None:
        """Drop an episode's labels."""
        self._labels.pop(rollout_id, None)

    def of(self, rollout_id: str) -> list[EpisodeLabeled]:
        """Return an episode's labels, one per labeler, the oldest first."""
        return list(self._labels.get(rollout_id, {}).values())

    def mean(self, rollout_id: str) -> float | None:
        """Return what an episode's labelers think on average, or None."""
        values = [one.value for one in self.of(rollout_id) if one.value is not None]
        return sum(values) / len(values) if values else None

    @property
    def rollout_ids(self) -> list[str]:
        """The episodes that have a label."""
        return list(self._labels)
