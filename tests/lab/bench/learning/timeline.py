"""A run on its own clock: when which tokens were trained, how its steps waited, who was trained."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from tests.lab.bench.learning.parts import Result

from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.base import Event
from penstock.messages.control import RunOpened
from penstock.messages.reward import EvalCompleted, Outcome
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import Purpose
from penstock.messages.telemetry import percentile
from penstock.messages.training import (
    BatchManifest,
    GroupEntry,
    MidtrainCompleted,
    StepCompleted,
)

TYPES: tuple[type[Event], ...] = (
    RunOpened, MidtrainCompleted, RolloutFinished, BatchManifest, StepCompleted, EvalCompleted,
)  # fmt: skip
NUM_QUANTILES = 4


class Timeline:
    """Folds a run's log, in the order of each stream."""

    def __init__(self) -> None:
        self._opened_at: list[float] = []
        self._steps: dict[int, tuple[float, StepCompleted]] = {}
        """Step -> when it was stored, unix seconds, and the event."""
        self._manifests: dict[int, BatchManifest] = {}
        self._rollouts: dict[str, RolloutFinished] = {}
        self._evals: dict[int, EvalCompleted] = {}
        self._first_started_at = math.inf
        self._rl_started_at = math.inf

    def add(self, event: Event, at: float) -> None:
        """Take an event that was stored at some time."""
        match event:
            case RunOpened():
                self._opened_at.append(at)
            case MidtrainCompleted():
                self._rl_started_at = min(self._rl_started_at, at)
            case StepCompleted():
                self._steps[event.step] = (at, event)
            case BatchManifest():
                self._manifests[event.step] = event
            case EvalCompleted() if event.num_tasks:
                self._evals[event.policy_version] = event
            case RolloutFinished() if event.purpose is Purpose.TRAIN:
                self._rollouts[event.rollout_id] = event
                self._first_started_at = min(self._first_started_at, at - event.wall_s)
            case _:
                pass

    def figures(self) -> Result:
        """Return the figures; times are seconds since the first rollout began.

        `rl_wall_s` begins with the evaluation before it, as the phase's processor time does.

        Waits are those of the steps after the first, which waits for machines and evaluations.
        """
        ends_s = self._ends_s()
        tokens, curve = 0, list[tuple[float, int]]()
        for step, (_, event) in sorted(self._steps.items()):
            tokens += sum(event.staleness_tokens.values())
            curve.append((round(ends_s[step], 2), tokens))
        waits = [event.wait_s for step, (_, event) in self._steps.items() if step > 1]
        rates = {v: one.num_solved / one.num_tasks for v, one in sorted(self._evals.items())}
        spans = [len(_versions(one)) for one in self._rollouts.values()]
        calls = [r.tool_s / r.num_calls for r in self._rollouts.values() if r.num_calls]
        wall_s = max(ends_s.values(), default=0.0)
        return {
            "wall_s": round(wall_s, 2),
            "rl_wall_s": round(wall_s + self._before_rollouts_s(), 2),
            "tokens_trained": tokens,
            "curve": curve,
            "heldout": [(round(ends_s.get(v, 0.0), 2), round(r, 4)) for v, r in rates.items()],
            "step_wait_s_p50": round(percentile(waits, 50), 2),
            "step_wait_s_p95": round(percentile(waits, 95), 2),
            "step_wait_share": round(sum(waits) / max(wall_s, 1e-9), 3),
            "rollouts_over_versions": round(sum(n > 1 for n in spans) / max(len(spans), 1), 3),
            "call_s_p50": round(percentile(calls, 50), 2),
            "call_s_p99": round(percentile(calls, 99), 2),
            **self._shares(),
        }

    def _before_rollouts_s(self) -> float:
        """Return the time from the end of mid-training to the first rollout, if the run was up."""
        first_at, started_at = self._first_started_at, self._rl_started_at
        was_down = any(started_at < opened_at <= first_at for opened_at in self._opened_at)
        return 0.0 if was_down or first_at == math.inf else max(0.0, first_at - started_at)

    def _ends_s(self) -> dict[int, float]:
        """Return when each step ended; what lies between two starts of the run does not count."""
        ends_s: dict[int, float] = {}
        last_at, now_s = self._first_started_at, 0.0
        for step, (at, event) in sorted(self._steps.items()):
            was_down = any(last_at < opened_at <= at for opened_at in self._opened_at)
            now_s += event.wait_s + event.train_s if was_down else max(0.0, at - last_at)
            ends_s[step], last_at = now_s, at
        return ends_s

    def _shares(self) -> Result:
        """Return what each quantile of tasks, by how long their rollouts took, loses of its share.

        Of the groups that are settled, those left out for their rewards or broken machines set
        aside: staleness has no part in that.
        """
        settled: list[tuple[float, GroupEntry, bool]] = []
        for manifest in self._manifests.values():
            for group in (*manifest.groups, *manifest.discarded):
                took_s = [
                    self._rollouts[one.rollout_id].wall_s
                    for one in group.samples
                    if one.rollout_id in self._rollouts
                ]
                outcomes = {one.outcome for one in group.samples if not one.outcome.is_masked}
                if took_s and outcomes and Outcome.FILTERED not in outcomes:
                    settled.append((fmean(took_s), group, group in manifest.groups))
        settled.sort(key=lambda one: one[0])
        started, trained = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for number in range(NUM_QUANTILES):
            low, high = (len(settled) * n // NUM_QUANTILES for n in (number, number + 1))
            for kind, (of_started, of_trained) in _counts(settled[low:high]).items():
                started[kind].append(of_started)
                trained[kind].append(of_trained)
        lost = {kind: _lost(started[kind], trained[kind]) for kind in started}
        withheld = sum(started["tokens"]) - sum(trained["tokens"])
        return {
            "share_lost": lost.get("rollouts", []),
            "share_lost_max": max(lost.get("rollouts", []), default=0.0),
            "tokens_lost": lost.get("tokens", []),
            "tokens_lost_max": max(lost.get("tokens", []), default=0.0),
            "withheld_tokens": round(withheld / max(sum(started["tokens"]), 1.0), 4),
            "num_groups_settled": len(settled),
        }


def _counts(
    settled: Sequence[tuple[float, GroupEntry, bool]],
) -> dict[str, tuple[float, float]]:
    """Return how many rollouts and tokens were started, and trained."""
    samples = [
        (sum(span.num_tokens for span in one.version_spans),
         sum(span.num_tokens for span in one.trained_spans) if is_trained else 0)
        for _, group, is_trained in settled
        for one in group.samples
        if not one.outcome.is_masked
    ]  # fmt: skip
    tokens = float(sum(sampled for sampled, _ in samples)), float(sum(t for _, t in samples))
    return {"rollouts": (float(len(samples)), float(sum(t > 0 for _, t in samples)))} | {
        "tokens": tokens
    }


def _lost(started: Sequence[float], trained: Sequence[float]) -> list[float]:
    """Return by quantile its share of what was started less that of what was trained."""
    totals = max(sum(started), 1.0), max(sum(trained), 1.0)
    return [round(s / totals[0] - t / totals[1], 4) for s, t in zip(started, trained, strict=True)]


def _versions(rollout: RolloutFinished) -> set[int]:
    return {span.policy_version for turn in rollout.turns for span in turn.version_spans}


def time_to(figures: Result, tokens: float) -> float:
    """Return when a run had trained so many tokens, between two steps in proportion."""
    before = (0.0, 0.0)
    for at, count in figures["curve"]:
        if count >= tokens:
            part = (tokens - before[1]) / max(count - before[1], 1e-9)
            return before[0] + part * (at - before[0])
        before = (at, count)
    return before[0]


def time_to_rate(figures: Result, rate: float) -> float:
    """Return when the first version was there that has at least a held-out rate."""
    return min(at for at, found in figures["heldout"] if found >= rate)


def read_timeline(run: RunDir) -> Timeline:
    """Return a run's timeline from its log.

    Raises:
        BusError: The log cannot be read.

    """
    return asyncio.run(_read(run))


async def _read(run: RunDir) -> Timeline:
    timeline = Timeline()
    async with open_log(run, "bench") as bus:
        async for delivery in bus.follow(TYPES, stop_at_end=True):
            timeline.add(delivery.event, delivery.stored_at)
    return timeline
