"""How the policy works in its episodes: parallel calls, reading before editing, effort per task.

Rows count all judged rollouts of a policy version, including those that the batcher did not train.
Rows hold counts, which can be added; shares are computed only for display.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from penstock.actors.monitor.curves import NUM_POINTS_MAX
from penstock.envs.harness.tools import READING_TOOLS, WRITING_TOOLS
from penstock.messages.reward import EvalAnnounced, Outcome, Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import Purpose

T = TypeVar("T")
NUM_WAITING_MAX = 16_384
"""Largest number of rollouts kept that wait for a verdict, and of verdicts that wait for a
rollout."""
NUM_EVALS_MAX = NUM_POINTS_MAX
"""Largest number of evaluations shown, over all sets."""
NUM_RECENT = 64
"""Smallest number of rollouts in the newest metrics."""


class BehaviorRow(msgspec.Struct, kw_only=True):
    """Counts over the rollouts of one or several consecutive policy versions."""

    policy_version: int
    """Newest version that sampled a token of a rollout; the first of several versions."""
    num_rollouts: int = 0
    num_turns: int = 0
    num_parallel_turns: int = 0
    """Number of turns with two or more calls."""
    num_looked: int = 0
    """Number of rollouts that read a file before they changed any."""
    num_solved: int = 0
    num_looked_solved: int = 0
    """Number of rollouts that read a file before they changed any, and solved their task."""
    num_solved_calls: int = 0
    """Number of calls in rollouts that solved their task."""
    num_solved_turns: int = 0
    """Number of turns in rollouts that solved their task."""

    @property
    def parallel_share(self) -> float | None:
        """Share of turns with two or more calls."""
        return _share(self.num_parallel_turns, self.num_turns)

    @property
    def looked_share(self) -> float | None:
        """Share of rollouts that read a file before they changed any."""
        return _share(self.num_looked, self.num_rollouts)

    @property
    def pass_rate(self) -> float | None:
        """Share of rollouts that solved their task."""
        return _share(self.num_solved, self.num_rollouts)

    @property
    def pass_rate_looked(self) -> float | None:
        """Pass rate of the rollouts that read a file before they changed any."""
        return _share(self.num_looked_solved, self.num_looked)

    @property
    def calls_per_solved(self) -> float | None:
        """Mean number of calls in rollouts that solved their task."""
        return _share(self.num_solved_calls, self.num_solved)

    @property
    def turns_per_solved(self) -> float | None:
        """Mean number of turns in rollouts that solved their task."""
        return _share(self.num_solved_turns, self.num_solved)


class GainView(msgspec.Struct, kw_only=True):
    """Decomposition of the gain in pass rate from the first evaluation to the last.

    A policy can gain only by reading files more often before it edits. With s the share of rollouts
    that do so and p their pass rate, the part due to better work is s_after * (p_after - p_before);
    the rest comes from reading more often, and from rollouts that pass without it.
    """

    eval_set: str = ""
    """Name of the evaluation set; empty: the only one."""
    temperature: float | None = None
    """Sampling temperature; 0: greedy; None: `pacer.eval_temperature`."""
    version_before: int
    version_after: int
    pass_before: float
    pass_after: float
    share_looks_before: float
    share_looks_after: float
    pass_given_look_before: float | None
    """Pass rate of the rollouts that read before editing; None if there were none."""
    pass_given_look_after: float | None
    gain_by_better_work: float | None
    """Share of the gain that is due to better work; None without a gain, or if no rollout read
    before editing."""


class BehaviorView(msgspec.Struct, kw_only=True):
    """How the policy works in its episodes: a section of the page."""

    training: list[BehaviorRow] = []
    """Training rollouts by version; in a long run each row covers several versions."""
    evals: list[BehaviorRow] = []
    """Rollouts of the main evaluation set, by version."""
    recent: BehaviorRow | None = None
    """Training rollouts of the newest versions, at least `NUM_RECENT` if there are as many."""
    gains: list[GainView] = []
    """Gains of the evaluation sets with two or more evaluations, the main set first."""


class _Rollout(msgspec.Struct, frozen=True):
    """A rollout that waits for its verdict."""

    is_eval: bool
    eval_id: str
    is_of_one_version: bool
    row: BehaviorRow
    """Counts to add if the rollout solved its task."""


class BehaviorViews:
    """Fold of finished rollouts and their verdicts, whichever arrives first."""

    def __init__(self, view: BehaviorView) -> None:
        self._view = view
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._training: dict[int, BehaviorRow] = {}
        self._width = 1
        """Number of versions per row of training."""
        self._evals: dict[tuple[str, int], BehaviorRow] = {}
        """(evaluation, version that sampled the tokens) -> counts."""
        self._evaluated: dict[str, EvalAnnounced] = {}
        """Announcements by evaluation id; they name the version whose tokens count."""
        self._has_changed = False

    def measure(self) -> None:
        """Bring the view up to date."""
        if not self._has_changed:
            return
        self._has_changed = False
        view = self._view
        view.training = [self._training[start] for start in sorted(self._training)]
        view.recent = _recent(view.training)
        sets: dict[tuple[bool, str], list[tuple[BehaviorRow, EvalAnnounced]]] = {}
        for (eval_id, version), row in self._evals.items():
            about = self._evaluated.get(eval_id)
            if about is not None and about.policy_version == version:
                sets.setdefault((not about.is_main, about.eval_set), []).append((row, about))
        view.evals, view.gains = [], []
        for (is_other, _), pairs in sorted(sets.items()):
            pairs.sort(key=lambda pair: pair[0].policy_version)
            if not is_other and not view.evals:
                view.evals = [row for row, _ in pairs]
            if len(pairs) > 1:
                view.gains.append(gain_between(pairs[0][0], pairs[-1][0], pairs[-1][1]))

    def announced(self, event: EvalAnnounced) -> None:
        """Record an announced evaluation."""
        self._evaluated[event.eval_id] = event
        self._has_changed = True
        if len(self._evaluated) > NUM_EVALS_MAX:
            self._evaluated = _thinned(self._evaluated)
            self._evals = {k: row for k, row in self._evals.items() if k[0] in self._evaluated}

    def finished(self, event: RolloutFinished) -> None:
        """Count a finished rollout, or keep it until its verdict arrives."""
        rollout = _Rollout(
            event.purpose is Purpose.EVAL,
            event.group_id,
            event.min_policy_version == event.max_policy_version,
            _row_of(event),
        )
        # Rollouts and verdicts are on different streams, so either may arrive first.
        outcome = self._outcomes.pop(event.rollout_id, None)
        if outcome is None:
            _keep(self._rollouts, event.rollout_id, rollout)
        else:
            self._count(rollout, outcome)

    def judged(self, event: Verdict) -> None:
        """Count a judged rollout, or keep the outcome until the rollout arrives."""
        rollout = self._rollouts.pop(event.rollout_id, None)
        if rollout is None:
            _keep(self._outcomes, event.rollout_id, event.outcome)
        else:
            self._count(rollout, event.outcome)

    def _count(self, rollout: _Rollout, outcome: Outcome) -> None:
        row = rollout.row
        version = row.policy_version
        if outcome.is_masked or version < 0:
            return
        # The row was made when the outcome was not known, as if the rollout solved its task.
        if outcome is not Outcome.SOLVED:
            row.num_solved = row.num_looked_solved = 0
            row.num_solved_calls = row.num_solved_turns = 0
        self._has_changed = True
        if not rollout.is_eval:
            _add(self._training_row(version), row)
        elif rollout.is_of_one_version:
            _add(self._evals.setdefault((rollout.eval_id, version), _empty(version)), row)

    def _training_row(self, version: int) -> BehaviorRow:
        """Return the row of a version, merging rows when there are too many."""
        start = version - version % self._width
        # Doubling the width keeps the number of rows bounded however long the run is.
        while start not in self._training and len(self._training) >= NUM_POINTS_MAX:
            self._width *= 2
            rows, self._training = self._training, {}
            for first, row in rows.items():
                merged = first - first % self._width
                _add(self._training.setdefault(merged, _empty(merged)), row)
            start = version - version % self._width
        return self._training.setdefault(start, _empty(start))


def gain_between(before: BehaviorRow, after: BehaviorRow, about: EvalAnnounced) -> GainView:
    """Return the decomposition of the gain between two evaluations of the same set."""
    pass_before, pass_after = before.pass_rate or 0.0, after.pass_rate or 0.0
    looked_before, looked_after = before.pass_rate_looked, after.pass_rate_looked
    looks_after, gain = after.looked_share or 0.0, pass_after - pass_before
    by_better_work = None
    if gain > 0.0 and looked_before is not None and looked_after is not None:
        by_better_work = looks_after * (looked_after - looked_before) / gain
    return GainView(
        eval_set=about.eval_set,
        temperature=about.temperature,
        version_before=before.policy_version,
        version_after=after.policy_version,
        pass_before=pass_before,
        pass_after=pass_after,
        share_looks_before=before.looked_share or 0.0,
        share_looks_after=looks_after,
        pass_given_look_before=looked_before,
        pass_given_look_after=looked_after,
        gain_by_better_work=by_better_work,
    )


def behavior_metrics(row: BehaviorRow) -> dict[str, float | None]:
    """Return the shares and means of a row, by their names in the summary and in Prometheus."""
    names = ("parallel_share", "looked_share", "pass_rate", "pass_rate_looked")
    return {name: getattr(row, name) for name in (*names, "calls_per_solved", "turns_per_solved")}


def reads_before_writing(tool_names: Sequence[Sequence[str]]) -> bool:
    """Return whether a file was read in a turn before the first turn that changes one."""
    for names in tool_names:
        # Writing is checked first: calls of one turn are sent together, so a file that is read and
        # changed in the same turn was changed without knowing its content.
        if not WRITING_TOOLS.isdisjoint(names):
            return False
        if not READING_TOOLS.isdisjoint(names):
            return True
    return False


def _row_of(event: RolloutFinished) -> BehaviorRow:
    """Return the counts that a rollout adds if it solved its task."""
    looked = int(reads_before_writing(event.tool_names))
    return BehaviorRow(
        policy_version=event.max_policy_version,
        num_rollouts=1,
        num_turns=len(event.turns),
        num_parallel_turns=sum(len(names) > 1 for names in event.tool_names),
        num_looked=looked,
        num_solved=1,
        num_looked_solved=looked,
        num_solved_calls=event.num_calls,
        num_solved_turns=len(event.turns),
    )


def _recent(rows: Sequence[BehaviorRow]) -> BehaviorRow | None:
    """Return the sum of the newest rows that together have `NUM_RECENT` rollouts."""
    if not rows:
        return None
    total = _empty(rows[-1].policy_version)
    for row in reversed(rows):
        _add(total, row)
        total.policy_version = row.policy_version
        if total.num_rollouts >= NUM_RECENT:
            break
    return total


def _thinned(evaluated: dict[str, EvalAnnounced]) -> dict[str, EvalAnnounced]:
    """Return every second evaluation of each set, always including its first and its newest."""
    by_set: dict[str, list[EvalAnnounced]] = {}
    for event in evaluated.values():
        by_set.setdefault(event.eval_set, []).append(event)
    kept = {
        event.eval_id
        for events in by_set.values()
        for event in (*events[:-1][::2], events[-1])
    }  # fmt: skip
    return {eval_id: event for eval_id, event in evaluated.items() if eval_id in kept}


def _add(total: BehaviorRow, row: BehaviorRow) -> None:
    for name in total.__struct_fields__:
        if name != "policy_version":
            setattr(total, name, getattr(total, name) + getattr(row, name))


def _empty(policy_version: int) -> BehaviorRow:
    return BehaviorRow(policy_version=policy_version)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _keep(table: OrderedDict[str, T], name: str, value: T) -> None:
    """Add a value and drop the oldest if the table is full."""
    table[name] = value
    # Bounded: a rollout whose worker was killed never gets its counterpart.
    if len(table) > NUM_WAITING_MAX:
        table.popitem(last=False)
