"""People's labels of a run's episodes, which judges are calibrated against.

Episodes are attempts at tasks, never users' requests; what users say about those is feedback.
"""

from typing import Annotated, ClassVar

import msgspec

from penstock.messages.base import Event, Stream

COMMENT_CHARS_MAX = 2_000
"""Maximum length of a comment in characters."""
LABELERS_MAX = 64
"""Maximum number of labelers kept per episode; the latest ones stay."""

LabelValue = Annotated[float, msgspec.Meta(ge=0, le=1)]
Comment = Annotated[str, msgspec.Meta(max_length=COMMENT_CHARS_MAX)]
Labeler = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class EpisodeLabeled(Event, frozen=True, kw_only=True):
    """Gateway, `penstock label` -> monitor, judge calibration: a person labeled an episode.

    Only the latest label by one labeler on an episode counts.
    """

    stream: ClassVar[Stream] = Stream.REWARDS
    keyed_by: ClassVar[tuple[str, ...]] = ("rollout_id", "label_id")
    rollout_id: str
    group_id: str
    label_id: str
    """Random id of the label, one subject token."""
    labeler: Labeler
    value: LabelValue | None = None
    """Label from 0 (bad) to 1 (good); None retracts it."""
    comment: Comment = ""


class EpisodeLabels:
    """Labels that count, by episode, folded from the log."""

    def __init__(self) -> None:
        self._labels: dict[str, dict[str, EpisodeLabeled]] = {}

    def add(self, event: EpisodeLabeled) -> None:
        """Apply the next event of the log."""
        labels = self._labels.setdefault(event.rollout_id, {})
        # Removed first, so that a new label moves its labeler to the end: the oldest is dropped.
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
        """Return an episode's labels, one per labeler, oldest first."""
        return list(self._labels.get(rollout_id, {}).values())

    def mean(self, rollout_id: str) -> float | None:
        """Return the mean of an episode's labels, or None without labels."""
        values = [label.value for label in self.of(rollout_id) if label.value is not None]
        return sum(values) / len(values) if values else None

    @property
    def rollout_ids(self) -> list[str]:
        """Ids of the labeled episodes."""
        return list(self._labels)
