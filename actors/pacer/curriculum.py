"""Which task each group attempts: fresh ones first, then those whose solve rate is uncertain. Pure.

```
 all tasks ──▶ fresh ──pick──▶ open (its group runs) ──manifest──▶ attempted ──pick──▶ open
                                              solved always or never │      ▲
                                                                     ▼      │ the evidence ages
                                                                  skipped ──┘
```
No task is attempted twice while there are fresh ones (unless `revisit_share` says so). Then an
attempted one is drawn with a chance that grows with the expected variance of its outcome: with
solved and failed rollouts as a Beta posterior of its solve rate p, E[p (1 - p)], which is what a
group's advantages are made of. One that all or none of its rollouts solved is skipped. Evidence
halves every `solve_rate_half_life` steps, since the policy changes; so a skipped task is drawn
again some day, the later, the more rollouts spoke against it.

`pick` depends on the seed, the group's index and what was noted before: grants, which are on the
log, and manifests. So a restart that reads them again picks the same. The state is a few numbers
for each task.

Example (groups of 8, half-life 16): 4 of 8 solved weighs 0.23; 8 of 8 is skipped for 16 steps, and
weighs 0.12 then.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.actors.pacer.config import PacerConfig
from penstock.messages.errors import ConfigError, PenstockError
from penstock.messages.task import GroupGranted, Task
from penstock.messages.training import GroupEntry

Bucket = tuple[str, str]
"""A source and a category."""


class TasksExhaustedError(PenstockError, RuntimeError):
    """There is no training task left to attempt."""


_TRACE = 1e-3
"""Rollouts that no longer count for anything."""
_CERTAIN_SHARE = 0.5
"""Of a group's rollouts: aged below this share, unanimous ones no longer keep a task from being
tried."""


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """Rollouts as of a step: older ones count less."""

    num_solved: float = 0.0
    num_failed: float = 0.0
    step: int = 0

    def aged(self, step: int, half_life: float) -> "_Evidence":
        """Return what is left of it at a later step."""
        left = 0.5 ** (max(0, step - self.step) / half_life)
        return _Evidence(
            num_solved=self.num_solved * left,
            num_failed=self.num_failed * left,
            step=max(self.step, step),
        )

    @property
    def variance(self) -> float:
        """E[p (1 - p)] under the posterior Beta(1 + solved, 1 + failed)."""
        a, b = 1 + self.num_solved, 1 + self.num_failed
        return a * b / ((a + b) * (a + b + 1))

    def is_certain(self, num_min: float) -> bool:
        """Whether the task is always or never solved, by more rollouts than `num_min`."""
        lesser, greater = sorted((self.num_solved, self.num_failed))
        return lesser < _TRACE and greater > num_min


@dataclass(kw_only=True)
class _Attempted:
    """What is known of a task."""

    task_id: str
    num_groups: int = 0
    """Number of groups granted for the task."""
    num_open: int = 0
    """Number of granted groups that no manifest has settled."""
    evidence: _Evidence = _Evidence()


class Curriculum:
    """Draws a source and a category by weight, then a task of these.

    Args:
        tasks: Of the training split.
        settings: How they are chosen.
        source_weights: Each source's share of the groups; one that is not named has the sum of its
            categories' weights.

    """

    saved = ("_attempted", "_step", "num_noted")

    def __init__(
        self, tasks: Sequence[Task], settings: PacerConfig, source_weights: Mapping[str, float]
    ) -> None:
        """Sort tasks by source and category.

        Raises:
            ConfigError: A weight for a category that has no task, or no task with a weight.

        """
        self._settings = settings
        self._weights = _bucket_weights(tasks, settings.category_weights, source_weights)
        self._fresh: dict[Bucket, list[Task]] = defaultdict(list)
        """All, also those attempted since; the next one last."""
        for task in tasks:
            self._fresh[_bucket(task)].append(task)
        for (source, category), of in self._fresh.items():
            random.Random(f"curriculum.{settings.seed}.{source}.{category}").shuffle(of)
        self._attempted: dict[str, _Attempted] = {}
        self._by_id = {task.task_id: task for task in tasks}
        self._step = 0
        self.num_noted = 0
        """Groups whose tasks are known."""

    def pick(self, group_index: int, without: Collection[str] = ()) -> GroupGranted:
        """Return the grant of a group; `note` makes it count.

        Args:
            group_index: Of the group.
            without: Tasks that may not be attempted.

        Raises:
            TasksExhaustedError: None may.

        """
        draw = random.Random(f"curriculum.{self._settings.seed}.{group_index}")
        fresh = self._fresh_by_bucket(without)
        num_fresh = sum(map(len, fresh.values()))
        revisits = draw.random() < self._settings.revisit_share or not fresh
        known = self._candidates(without) if revisits else []
        useful = [
            one
            for one in known
            if not self._aged(one).is_certain(_CERTAIN_SHARE * self._settings.group_size)
        ]
        if useful:
            buckets = {self._bucket_of(one) for one in useful}
            bucket = _drawn(draw, self._weights, buckets)
            of = [one for one in useful if self._bucket_of(one) == bucket]
            chosen = draw.choices(of, [self._aged(one).variance for one in of])[0]
            task = self._by_id[chosen.task_id]
        elif fresh:
            task = fresh[_drawn(draw, self._weights, fresh)][-1]
        elif known:
            chosen = max(known, key=lambda one: (self._aged(one).variance, -one.num_groups))
            task = self._by_id[chosen.task_id]
        else:
            raise TasksExhaustedError(
                f"group {group_index}: no task of a source and category with a weight is left, "
                f"{len(without)} of the {len(self._by_id)} tasks are quarantined"
            )
        before = self._attempted.get(task.task_id)
        return GroupGranted(
            group_index=group_index,
            task_id=task.task_id,
            source=task.source,
            attempt=before.num_groups if before else 0,
            num_fresh=num_fresh if before else num_fresh - 1,
            num_skipped=len(known) - len(useful),
        )

    def task(self, task_id: str) -> Task:
        """Return a task that was picked."""
        return self._by_id[task_id]

    def note(self, granted: GroupGranted) -> None:
        """Count a grant, in the order of groups; one that was counted changes nothing."""
        if granted.group_index != self.num_noted:
            assert granted.group_index < self.num_noted, f"group {self.num_noted} is missing"
            return
        self.num_noted += 1
        if granted.task_id not in self._attempted:
            self._attempted[granted.task_id] = _Attempted(task_id=granted.task_id)
        attempted = self._attempted[granted.task_id]
        attempted.num_groups += 1
        attempted.num_open += 1

    def settle(self, group: GroupEntry, step: int, *, differs: bool) -> None:
        """See how a group did.

        Args:
            group: Of a manifest.
            step: Of the manifest.
            differs: Whether its rollouts did not all do equally well. Where all or none of these
                are solved all the same, their scores differ: the task is neither.

        """
        self._step = max(self._step, step)
        attempted = self._attempted.get(group.task_id)
        if attempted is None:
            return
        attempted.num_open = max(0, attempted.num_open - 1)
        if group.num_judged == 0:
            return
        num_solved = float(group.num_solved)
        if differs:
            num_solved = min(max(num_solved, 0.5), group.num_judged - 0.5)
        before = attempted.evidence.aged(step, self._settings.solve_rate_half_life)
        attempted.evidence = _Evidence(
            num_solved=before.num_solved + num_solved,
            num_failed=before.num_failed + group.num_judged - num_solved,
            step=before.step,
        )

    def _fresh_by_bucket(self, without: Collection[str]) -> dict[Bucket, list[Task]]:
        found = {
            bucket: [
                task
                for task in self._fresh[bucket]
                if task.task_id not in without and task.task_id not in self._attempted
            ]
            for bucket in self._weights
        }
        return {bucket: tasks for bucket, tasks in found.items() if tasks}

    def _candidates(self, without: Collection[str]) -> list[_Attempted]:
        """Return the attempted tasks that may be again; open ones only if there are no others."""
        known = [
            one
            for one in self._attempted.values()
            if self._bucket_of(one) in self._weights and one.task_id not in without
        ]
        return [one for one in known if one.num_open == 0] or known

    def _bucket_of(self, one: _Attempted) -> Bucket:
        return _bucket(self._by_id[one.task_id])

    def _aged(self, one: _Attempted) -> _Evidence:
        return one.evidence.aged(self._step, self._settings.solve_rate_half_life)


def _bucket(task: Task) -> Bucket:
    return task.source, task.category


def _bucket_weights(
    tasks: Sequence[Task],
    category_weights: Mapping[str, float],
    source_weights: Mapping[str, float],
) -> dict[Bucket, float]:
    """Return the weight of each source and category above 0: a source's is shared out."""
    buckets = sorted({_bucket(task) for task in tasks})
    known = sorted({category for _, category in buckets})
    if unknown := sorted(set(category_weights) - set(known)):
        raise ConfigError(
            f"pacer.category_weights: unknown categories {unknown}; there are: {', '.join(known)}"
        )
    categories = dict(category_weights) or dict.fromkeys(known, 1.0)
    own = {bucket: categories.get(bucket[1], 0.0) for bucket in buckets}
    totals: dict[str, float] = defaultdict(float)
    for (source, _), weight in own.items():
        totals[source] += weight
    weights = {
        (source, category): source_weights.get(source, totals[source]) * weight / totals[source]
        for (source, category), weight in own.items()
        if weight > 0
    }
    weights = {bucket: weight for bucket, weight in weights.items() if weight > 0}
    if not weights:
        raise ConfigError("pacer.category_weights: expected a task and a weight above 0")
    return weights


def _drawn(
    draw: random.Random, weights: Mapping[Bucket, float], among: Collection[Bucket]
) -> Bucket:
    buckets = sorted(among)
    return draw.choices(buckets, [weights[bucket] for bucket in buckets])[0]
