"""The index of a run's newest episodes, folded from its log."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from penstock.messages.base import Event
from penstock.messages.requests.episodes import EpisodeFilter, EpisodeRow
from penstock.messages.reward import Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.signals.episode_labels import EpisodeLabeled, EpisodeLabels
from penstock.messages.training import BatchManifest

NUM_EPISODES_MAX = 20_000
"""Largest number of episodes in an index; older ones are still on the log."""


class EpisodeIndex:
    """Rows by rollout id, in the order of their first event on the log."""

    def __init__(self, num_episodes_max: int = NUM_EPISODES_MAX) -> None:
        self.num_max = num_episodes_max
        self._rows: OrderedDict[str, EpisodeRow] = OrderedDict()
        self._groups: defaultdict[str, set[str]] = defaultdict(set)
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            RolloutFinished: self._finished,
            Verdict: self._judged,
            BatchManifest: self._manifest,
            EpisodeLabeled: self._labeled,
        }
        self.labels = EpisodeLabels()
        """Labels without their comments, to save memory; the log has them."""

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self._rows)

    def find(self, rollout_id: str) -> EpisodeRow | None:
        """Return an episode's row, or None if the index has none."""
        return self._rows.get(rollout_id)

    def select(self, wanted: EpisodeFilter) -> list[EpisodeRow]:
        """Return the rows that match a filter, newest first, at most `wanted.limit`."""
        kept = (row for row in reversed(self._rows.values()) if wanted.keeps(row))
        return list(islice(kept, wanted.limit))

    def group(self, group_id: str, task_id: str) -> list[EpisodeRow]:
        """Return a group's attempts at a task, ordered by id."""
        # Filtered by task, as an evaluation is one group with many tasks.
        rows = (self._rows[rollout_id] for rollout_id in sorted(self._groups.get(group_id, ())))
        return [row for row in rows if row.task_id == task_id]

    def _row(self, rollout_id: str, group_id: str) -> EpisodeRow:
        row = self._rows.get(rollout_id)
        if row is None:
            row = EpisodeRow(rollout_id=rollout_id, group_id=group_id)
            self._rows[rollout_id] = row
            self._groups[group_id].add(rollout_id)
        while len(self._rows) > self.num_max:
            oldest_id, dropped = self._rows.popitem(last=False)
            self.labels.forget(oldest_id)
            self._groups[dropped.group_id].discard(oldest_id)
            if not self._groups[dropped.group_id]:
                del self._groups[dropped.group_id]
        return row

    def _finished(self, event: RolloutFinished, at: float) -> None:
        row = self._row(event.rollout_id, event.group_id)
        row.task_id = event.task_id
        row.category, row.source, row.purpose = event.category, event.source, event.purpose
        row.finished_at, row.end = at, event.end
        row.num_turns, row.num_tokens = len(event.turns), event.num_sampled_tokens
        row.num_calls, row.wall_s = event.num_calls, event.wall_s
        row.version_max = event.max_policy_version
        row.version_min = event.min_policy_version if event.num_sampled_tokens else -1

    def _judged(self, event: Verdict, at: float) -> None:
        row = self._row(event.rollout_id, event.group_id)
        row.purpose, row.category = event.purpose, event.category
        row.judge, row.outcome = event.judge, event.outcome
        row.reward = None if event.outcome.is_masked else event.reward
        row.num_findings = len(event.findings)

    def _labeled(self, event: EpisodeLabeled, at: float) -> None:
        row = self._row(event.rollout_id, event.group_id)
        self.labels.add(msgspec.structs.replace(event, comment=""))
        row.num_labels = len(self.labels.of(event.rollout_id))
        row.label = self.labels.mean(event.rollout_id)

    def _manifest(self, event: BatchManifest, at: float) -> None:
        for group in (*event.groups, *event.discarded):
            for sample in group.samples:
                row = self._row(sample.rollout_id, group.group_id)
                row.step, row.fate = event.step, sample.outcome
                row.advantage = sample.advantage
