"""Gates before users are served: the quality bar and the paired evaluation. Pure."""

from collections import OrderedDict
from math import comb

import msgspec

from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.messages.gates import Gate, GateState
from penstock.messages.reward import EvalAnnounced, EvalCompleted, Outcome, Verdict
from penstock.messages.task import Purpose

NUM_EVALS_MAX = 64
"""Largest number of evaluations kept."""


class _Evaluation(msgspec.Struct):
    announced: EvalAnnounced | None = None
    completed: EvalCompleted | None = None
    solved: dict[str, bool] = {}
    """Whether the task was solved, by the number of the attempt; only verdicts that count."""

    @property
    def is_whole(self) -> bool:
        """Whether the result and all counted verdicts are read."""
        # Verdicts are on another stream than the result, and may arrive after it.
        return self.completed is not None and len(self.solved) >= self.completed.num_tasks


def mcnemar(num_worse: int, num_better: int) -> float:
    """Return the one-sided p-value of McNemar's exact test that the candidate is worse.

    Under the null hypothesis each discordant pair falls either way with probability 1/2, so this is
    the probability of `num_worse` losses or more (McNemar 1947).

    Example:
        `mcnemar(5, 0)` is 1/32.

    """
    num = num_worse + num_better
    return sum(comb(num, k) for k in range(num_worse, num + 1)) / 2**num


class OfflineGates:
    """Gates from evaluations on held-out tasks; only the newest `NUM_EVALS_MAX` are kept."""

    def __init__(self, config: GatekeeperConfig, judge: str) -> None:
        self._config = config
        self._judge = judge
        self._evaluations: OrderedDict[str, _Evaluation] = OrderedDict()
        self._bar: EvalCompleted | None = None
        """Newest evaluation of a version from before live training."""
        self._live_since: int | None = None
        """Version from which the first live sample was trained; None before that."""

    def live_trained(self, policy_version: int) -> None:
        """Record that a batch with live samples was trained from a version."""
        if self._live_since is None or policy_version < self._live_since:
            self._live_since = policy_version
            # Results and manifests are on different streams: an evaluation of a version that
            # includes live training may have been taken for the bar. Choose again.
            if self._bar is not None and self._bar.policy_version > policy_version:
                self._bar = None
                for evaluation in self._evaluations.values():
                    if evaluation.completed is not None:
                        self._consider(evaluation.completed)

    def announced(self, event: EvalAnnounced) -> None:
        """Record that an evaluation was announced."""
        self._of(event.eval_id).announced = event

    def completed(self, event: EvalCompleted) -> None:
        """Record the result of an evaluation."""
        self._of(event.eval_id).completed = event
        self._consider(event)

    def verdict(self, event: Verdict) -> None:
        """Record a verdict of an evaluation; ignore rollouts that mix versions."""
        if event.purpose is not Purpose.EVAL or event.judge != self._judge:
            return
        is_single = event.policy_version == event.policy_version_max or event.policy_version_max < 0
        if is_single and not event.outcome.is_masked:
            place = event.rollout_id.rpartition("-")[2]
            self._of(event.group_id).solved[place] = event.outcome is Outcome.SOLVED

    def is_announced(self, policy_version: int, num_tasks: int) -> bool:
        """Return whether an evaluation of a version on that many tasks is running or done."""
        return self._find(policy_version, num_tasks) is not None

    def quality_gate(self) -> Gate:
        """Return the gate on the pass rate that the policy had before live training."""
        bar, found = self._config.quality_bar, self._bar
        if bar == 0:
            return Gate(name="quality_bar", state=GateState.PASSED, words="turned off")
        if found is None:
            words = "no version from before live training has been evaluated"
            return Gate(name="quality_bar", state=GateState.WAITING, words=words, bound=bar)
        rate = found.num_solved / max(1, found.num_tasks)
        return Gate(
            name="quality_bar",
            state=GateState.PASSED if rate >= bar else GateState.FAILED,
            words=f"version {found.policy_version}: {rate:.3g} of {found.num_tasks} tasks, "
            f"expected {bar:g}",
            value=rate,
            bound=bar,
            num_candidate=found.num_tasks,
        )

    def paired_gate(self, candidate: int, stable: int, num_tasks: int) -> Gate:
        """Return the gate that compares the candidate with stable on the same tasks."""
        settings = self._config.offline
        if settings.num_tasks == 0:
            return Gate(name="offline", state=GateState.PASSED, words="turned off")
        if num_tasks == 0:
            words = "the run has no held-out tasks; set gatekeeper.offline.num_tasks=0 to skip them"
            return Gate(name="offline", state=GateState.FAILED, words=words)
        tested, reference = self._find(candidate, num_tasks), self._find(stable, num_tasks)
        if tested is None or reference is None or not (tested.is_whole and reference.is_whole):
            words = f"waiting for evaluations of versions {candidate} and {stable}"
            words = f"{words} on {num_tasks} tasks"
            return Gate(name="offline", state=GateState.WAITING, words=words)
        pairs = [
            (tested.solved[place], reference.solved[place])
            for place in {*tested.solved} & {*reference.solved}
        ]
        better, worse = pairs.count((True, False)), pairs.count((False, True))
        num = len(pairs)
        difference, p = (better - worse) / max(1, num), mcnemar(worse, better)
        words = f"{num} tasks, {better} gained, {worse} lost, p-value {p:.3g}"
        # Masked verdicts and the deadline leave tasks without a pair; a few pairs prove nothing.
        if num < min(settings.num_pairs_min, num_tasks):
            state, words = GateState.FAILED, f"{words}; expected {settings.num_pairs_min} pairs"
        elif p < settings.alpha or difference < -settings.margin:
            state = GateState.REJECTED
        else:
            state = GateState.PASSED
        return Gate(
            name="offline",
            state=state,
            words=words,
            value=sum(is_solved for is_solved, _ in pairs) / max(1, num),
            baseline=sum(is_solved for _, is_solved in pairs) / max(1, num),
            bound=settings.margin,
            num_candidate=num,
            num_stable=num,
        )

    def _of(self, eval_id: str) -> _Evaluation:
        found = self._evaluations.setdefault(eval_id, _Evaluation())
        if len(self._evaluations) > NUM_EVALS_MAX:
            self._evaluations.popitem(last=False)
        return found

    def _find(self, policy_version: int, num_tasks: int) -> _Evaluation | None:
        """Return the newest evaluation of a version on that many tasks of the default set."""
        for evaluation in reversed(self._evaluations.values()):
            about = evaluation.announced
            # Named sets have their own tasks and temperature, and cannot be paired.
            if about is None or about.eval_set:
                continue
            if (about.policy_version, about.num_tasks) == (policy_version, num_tasks):
                return evaluation
        return None

    def _consider(self, event: EvalCompleted) -> None:
        if not event.is_main:
            return
        # The version from which the first live sample was trained is itself free of it.
        is_before = self._live_since is None or event.policy_version <= self._live_since
        if is_before and (self._bar is None or event.policy_version >= self._bar.policy_version):
            self._bar = event
