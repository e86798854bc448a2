"""The learning curves: mid-training, steps, evaluations, staleness."""

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from penstock.actors.monitor.curves import NUM_SAMPLES_MAX, append_thinned, median_or_none
from penstock.actors.monitor.state import MidtrainPoint, MonitorState, StepPoint
from penstock.actors.monitor.task_views import TaskViews
from penstock.messages.base import Event
from penstock.messages.reward import EvalCompleted
from penstock.messages.task import CreditsChanged
from penstock.messages.telemetry import MidtrainProgressed, percentile
from penstock.messages.training import MidtrainCompleted, StepCompleted

NUM_METRICS_MAX = 56
"""Metrics kept of a step, so that the state stays small; a step of the trainer has fewer."""
DIGITS = 6
"""Of each of them, for the same reason."""
NUM_STEPS_MAX = 180
"""Points of the steps' curve: likewise."""


class LearningViews:
    """Folds the reports of the trainer, the pacer and the evaluator."""

    def __init__(self, state: MonitorState, tasks: TaskViews) -> None:
        self._state = state
        self._tasks = tasks
        self._steps_s: deque[float] = deque(maxlen=NUM_SAMPLES_MAX)
        self._waits_s: deque[float] = deque(maxlen=NUM_SAMPLES_MAX)
        self._route_bytes: deque[float] = deque(maxlen=NUM_SAMPLES_MAX)
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            MidtrainProgressed: self._midtrain_progressed,
            MidtrainCompleted: self._midtrain_completed,
            StepCompleted: self._step_completed,
            EvalCompleted: self._eval_completed,
            CreditsChanged: self._credits_changed,
        }

    def measure_medians(self) -> None:
        """Set the medians over steps."""
        self._state.training.step_s_p50 = median_or_none(self._steps_s)
        self._state.training.wait_s_p95 = percentile(self._waits_s, 95) if self._waits_s else None
        self._state.training.route_bytes_p50 = median_or_none(self._route_bytes)

    def _midtrain_progressed(self, event: MidtrainProgressed, at: float) -> None:
        view = self._state.midtrain
        if self._state.run.phase == "starting":
            self._state.run.phase = "midtrain"
        view.num_tokens, view.num_tokens_total = event.num_tokens, event.num_tokens_total
        view.tokens_per_s = event.tokens_per_s
        view.loss_last = event.loss
        view.heldout_loss = event.heldout_loss or view.heldout_loss
        view.num_saves = event.num_saves
        if math.isfinite(event.loss):
            point = MidtrainPoint(
                num_tokens=event.num_tokens, loss=event.loss, heldout_loss=event.heldout_loss
            )
            append_thinned(view.points, point)

    def _midtrain_completed(self, event: MidtrainCompleted, at: float) -> None:
        view = self._state.midtrain
        if self._state.run.phase not in {"finished", "serving"}:
            self._state.run.phase = "rl"
        self._state.run.rl_started_at = at
        view.num_tokens = event.num_tokens
        view.num_tokens_total = max(view.num_tokens_total, event.num_tokens)
        view.loss_first, view.loss_last = event.loss_first, event.loss_last
        view.heldout_loss = event.heldout_loss
        view.heldout_perplexity = event.heldout_perplexity
        view.wall_s = event.wall_s
        view.num_saves, view.num_resumed = event.num_saves, event.num_resumed
        if event.is_cached:
            self._state.run.cached.append("mid-training")

    def _step_completed(self, event: StepCompleted, at: float) -> None:
        named = islice(sorted(event.metrics.items()), NUM_METRICS_MAX)
        finite = {
            name: float(f"{value:.{DIGITS}g}") for name, value in named if math.isfinite(value)
        }
        point = StepPoint(
            step=event.step, at=at, train_s=event.train_s, wait_s=event.wait_s, metrics=finite
        )
        append_thinned(self._state.steps, point, NUM_STEPS_MAX)
        self._state.run.step = max(self._state.run.step, event.step)
        training, route_bytes = self._state.training, event.metrics.get("route_bytes", 0.0)
        training.train_s += event.train_s
        training.num_skipped += bool(event.skipped)
        training.tokens_read += event.metrics.get("tokens_read", 0.0)
        training.route_bytes += route_bytes
        self._steps_s.append(event.wait_s + event.train_s)
        self._waits_s.append(event.wait_s)
        self._route_bytes.append(route_bytes)
        view = self._state.staleness
        for staleness, num_tokens in event.staleness_tokens.items():
            view.tokens[staleness] = view.tokens.get(staleness, 0) + num_tokens
        view.seen_max = max(view.tokens, default=0)

    def _eval_completed(self, event: EvalCompleted, at: float) -> None:
        point = self._tasks.evaluated(event, at)
        if event.is_main:
            append_thinned(self._state.evals, point)

    def _credits_changed(self, event: CreditsChanged, at: float) -> None:
        view = self._state.staleness
        view.budget_max = event.staleness_max
        view.num_groups_granted = event.num_groups_granted
        view.num_groups_trained = event.num_groups_trained
        view.num_groups_discarded = event.num_groups_discarded
        view.num_groups_allowed = event.num_groups_allowed
        view.policy_version = event.policy_version
