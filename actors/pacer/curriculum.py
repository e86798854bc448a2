"""Picks each group's task: fresh tasks first, then those with an uncertain solve rate. Pure.

```
 all tasks ──▶ fresh ──pick──▶ open (its group runs) ──manifest──▶ attempted ──pick──▶ open
                                              solved always or never │      ▲
                                                                     ▼      │ evidence decays
                                                                  skipped ──┘
```
No task is repeated while fresh ones are left, except for `revisit_share`. After that, tasks are
drawn in proportion to the expected variance of their outcome, E[p (1 - p)] under a Beta posterior
of the solve rate p: without variance, a group has no advantages. Tasks that all or none of their
rollouts solved are skipped. Evidence halves every `solve_rate_half_life` steps, because the policy
changes; so a skipped task returns, later the more rollouts were unanimous.

`pick` depends on the seed, the group's index, and the grants and manifests before it, all of which
are on the log: a restarted pacer picks the same tasks. The state is a few numbers per task.

Example (groups of 8, half-life 16): 4 of 8 solved weighs 0.23; 8 of 8 is skipped for 16 steps and
then weighs 0.12.
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
    """No training task is left to attempt."""


_TRACE = 1e-3
"""Decayed number of rollouts that counts as none."""
_CERTAIN_SHARE = 0.5
"""A unanimous task is skipped while its decayed rollouts exceed this share of a group."""


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """Numbers of solved and failed rollouts at a step, with exponential decay."""

    num_solved: float = 0.0
    num_failed: float = 0.0
    step: int = 0

    def aged(self, step: int, half_life: float) -> "_Evidence":
        """Return the evidence decayed to a later step."""
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
        """Whether more than `num_min` rollouts were unanimous."""
        lesser, greater = sorted((self.num_solved, self.num_failed))
        return lesser < _TRACE and greater > num_min


@dataclass(kw_only=True)
class _AttemptedTask:
    """A task with its history."""

    task_id: str
    num_groups: int = 0
    """Groups granted for the task."""
    num_open: int = 0
    """Granted groups that no manifest has settled."""
    evidence: _Evidence = _Evidence()


class Curriculum:
    """Draws a source and a category by weight, then one of their tasks.

    Args:
        source_weights: Share of each source in the groups; by default the sum of its categories'
            weights.

    Raises:
        ConfigError: A weighted category has no task, or no task has a weight.

    """

    saved = ("_attempted", "_step", "num_noted")

    def __init__(
        self, tasks: Sequence[Task], settings: PacerConfig, source_weights: Mapping[str, float]
    ) -> None:
        self._settings = settings
        self._weights = _bucket_weights(tasks, settings.category_weights, source_weights)
        self._fresh: dict[Bucket, list[Task]] = defaultdict(list)
        """All, also those attempted since; the next one last."""
        for task in tasks:
            self._fresh[_bucket(task)].append(task)
        for (source, category), bucket in self._fresh.items():
            # A generator per bucket: tasks added to one bucket do not reorder the others.
            random.Random(f"curriculum.{settings.seed}.{source}.{category}").shuffle(bucket)
        self._attempted: dict[str, _AttemptedTask] = {}
        self._by_id = {task.task_id: task for task in tasks}
        self._step = 0
        self.num_noted = 0
        """Grants recorded, in the order of groups."""

    def pick(self, group_index: int, without: Collection[str] = ()) -> GroupGranted:
        """Return the grant of a group without recording it; see `note`.

        Args:
            without: Ids of tasks to exclude.

        Raises:
            TasksExhaustedError: No task is left.

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
            bucket = _draw_bucket(draw, self._weights, buckets)
            of = [one for one in useful if self._bucket_of(one) == bucket]
            chosen = draw.choices(of, [self._aged(one).variance for one in of])[0]
            task = self._by_id[chosen.task_id]
        elif fresh:
            task = fresh[_draw_bucket(draw, self._weights, fresh)][-1]
        elif known:
            chosen = max(known, key=lambda one: (self._aged(one).variance, -one.num_groups))
            task = self._by_id[chosen.task_id]
        else:
            raise TasksExhaustedError(
                f"group {group_index}: no task with a positive weight is left; "
                f"{len(without)} of {len(self._by_id)} tasks are quarantined"
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
        """Return a task by its id."""
        return self._by_id[task_id]

    def note(self, granted: GroupGranted) -> None:
        """Record a grant, in the order of groups; a repeated one has no effect."""
        if granted.group_index != self.num_noted:
            assert granted.group_index < self.num_noted, f"group {self.num_noted} is missing"
            return
        self.num_noted += 1
        if granted.task_id not in self._attempted:
            self._attempted[granted.task_id] = _AttemptedTask(task_id=granted.task_id)
        attempted = self._attempted[granted.task_id]
        attempted.num_groups += 1
        attempted.num_open += 1

    def settle(self, group: GroupEntry, step: int, *, differs: bool) -> None:
        """Update a task's evidence with a group's results.

        Args:
            differs: Whether the group's rollouts earned different rewards.

        """
        self._step = max(self._step, step)
        attempted = self._attempted.get(group.task_id)
        if attempted is None:
            return
        attempted.num_open = max(0, attempted.num_open - 1)
        # Masked rollouts say nothing about the task.
        if group.num_judged == 0:
            return
        num_solved = float(group.num_solved)
        # Equal outcomes with different scores still train: the task is not settled.
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

    def _candidates(self, without: Collection[str]) -> list[_AttemptedTask]:
        known = [
            one
            for one in self._attempted.values()
            if self._bucket_of(one) in self._weights and one.task_id not in without
        ]
        return [one for one in known if one.num_open == 0] or known

    def _bucket_of(self, one: _AttemptedTask) -> Bucket:
        return _bucket(self._by_id[one.task_id])

    def _aged(self, one: _AttemptedTask) -> _Evidence:
        return one.evidence.aged(self._step, self._settings.solve_rate_half_life)


def _bucket(task: Task) -> Bucket:
    return task.source, task.category


def _bucket_weights(
    tasks: Sequence[Task],
    category_weights: Mapping[str, float],
    source_weights: Mapping[str, float],
) -> dict[Bucket, float]:
    """Return the positive weights; a source's weight is divided among its categories."""
    buckets = sorted({_bucket(task) for task in tasks})
    known = sorted({category for _, category in buckets})
    if unknown := sorted(set(category_weights) - set(known)):
        raise ConfigError(
            f"pacer.category_weights: unknown categories {unknown}, expected some of "
            f"{', '.join(known)}"
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


def _draw_bucket(
    draw: random.Random, weights: Mapping[Bucket, float], among: Collection[Bucket]
) -> Bucket:
    # Sorted, because sets have no order and a restarted pacer has to draw the same.
    buckets = sorted(among)
    return draw.choices(buckets, [weights[bucket] for bucket in buckets])[0]
