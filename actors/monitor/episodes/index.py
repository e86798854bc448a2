"""The rows of a run's newest episodes, folded from its log."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from penstock.actors.monitor.episodes.rows import EpisodeFilter, EpisodeRow
from penstock.messages.base import Event
from penstock.messages.reward import Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.training import BatchManifest, SampleEntry

NUM_EPISODES_MAX = 20_000
"""The newest ones that an index knows; of older ones the log has everything."""


class EpisodeIndex:
    """Rows by rollout id, in the order in which the log first names them."""

    def __init__(self, num_episodes_max: int = NUM_EPISODES_MAX) -> None:
        self._num_max = num_episodes_max
        self._rows: OrderedDict[str, EpisodeRow] = OrderedDict()
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            RolloutFinished: self._finished,
            Verdict: self._judged,
            BatchManifest: self._manifest,
        }

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self._rows)

    def find(self, rollout_id: str) -> EpisodeRow | None:
        """Return an episode's row, or None."""
        return self._rows.get(rollout_id)

    def select(self, wanted: EpisodeFilter) -> list[EpisodeRow]:
        """Return the rows that a filter keeps, newest first, at most `wanted.limit`."""
        kept = (row for row in reversed(self._rows.values()) if wanted.keeps(row))
        return list(islice(kept, wanted.limit))

    def group(self, group_id: str) -> list[EpisodeRow]:
        """Return the episodes of a group, in the order of their ids."""
        rows = (row for row in self._rows.values() if row.group_id == group_id)
        return sorted(rows, key=lambda row: row.rollout_id)

    def _row(self, rollout_id: str) -> EpisodeRow:
        row = self._rows.setdefault(rollout_id, EpisodeRow(rollout_id=rollout_id))
        while len(self._rows) > self._num_max:
            self._rows.popitem(last=False)
        return row

    def _finished(self, event: RolloutFinished, at: float) -> None:
        row = self._row(event.rollout_id)
        row.group_id, row.task_id = event.group_id, event.task_id
        row.category, row.source, row.purpose = event.category, event.source, event.purpose
        row.finished_at, row.end = at, event.end
        row.num_turns, row.num_tokens = len(event.turns), event.num_sampled_tokens
        row.num_calls, row.wall_s = event.num_calls, event.wall_s
        row.version_max = event.max_policy_version
        row.version_min = event.min_policy_version if event.num_sampled_tokens else -1

    def _judged(self, event: Verdict, at: float) -> None:
        row = self._row(event.rollout_id)
        row.group_id, row.purpose, row.category = event.group_id, event.purpose, event.category
        row.judge, row.outcome = event.judge, event.outcome
        row.reward = None if event.outcome.is_masked else event.reward
        row.num_findings = len(event.findings)

    def _manifest(self, event: BatchManifest, at: float) -> None:
        for group in (*event.groups, *event.discarded):
            self._settle(group.samples, event.step)

    def _settle(self, samples: Iterable[SampleEntry], step: int) -> None:
        for sample in samples:
            row = self._row(sample.rollout_id)
            row.step, row.fate, row.advantage = step, sample.outcome, sample.advantage
