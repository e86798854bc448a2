"""Folds events into the view model of the run, in the same way live as from a finished log. Pure.

`ActorViews` covers which actors report, how busy they are and what each waits for; `LearningViews`
covers mid-training, steps, evaluations and staleness; `RunFold` combines these with the views of
the other modules.
"""

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from penstock.actors.monitor.behavior_views import BehaviorViews
from penstock.actors.monitor.charge_views import ChargeView
from penstock.actors.monitor.compute_views import ComputeViews
from penstock.actors.monitor.curves import (
    NUM_SAMPLES_MAX,
    append_tail,
    append_thinned,
    median_or_none,
)
from penstock.actors.monitor.gate_views import GateViews
from penstock.actors.monitor.judge_views import add_verdict
from penstock.actors.monitor.log_lines import DESCRIBED_EVENTS, describe
from penstock.actors.monitor.regions import RegionViews
from penstock.actors.monitor.stall_views import StallView
from penstock.actors.monitor.state import (
    ActorView,
    LedgerView,
    MidtrainPoint,
    MonitorState,
    StepPoint,
    StreamView,
)
from penstock.actors.monitor.task_views import TaskViews
from penstock.actors.monitor.wait_graph import explain, is_reporting, weight_backpressure
from penstock.messages.base import Event
from penstock.messages.control import (
    ActorFailed,
    ActorStarted,
    ItemCharged,
    ItemQuarantined,
    LogArchived,
    MessageRejected,
    RunFinished,
    RunOpened,
    RunStarted,
)
from penstock.messages.feedback import (
    FeedbackReceived,
    FeedbackRetracted,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.reading.ledger import Ledger
from penstock.messages.reward import EvalAnnounced, EvalCompleted, Verdict
from penstock.messages.rollout import RolloutFinished, SandboxRecord, TurnSampled
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.task import CreditsChanged, Purpose
from penstock.messages.telemetry import ActorReported, MidtrainProgressed, percentile
from penstock.messages.training import BatchManifest, MidtrainCompleted, StepCompleted

NUM_WAITS_SHOWN = 4
"""Number of waits kept per actor, the oldest first."""
ERROR_CHARS_MAX = 300
"""Longest error text kept of an actor."""
CUMULATIVE_GAUGES = ("engine_busy_s", "digest_mismatches", "generated_tokens", "prefill_tokens")
"""Names of gauges that generators and receivers count up from 0 after each start."""


class ActorViews:
    """Fold of actors' starts, failures and reports."""

    def __init__(self, actors: dict[str, ActorView]) -> None:
        self._actors = actors
        self.service_since = 0.0
        """Start of `penstock serve` on the run, in Unix seconds; actors that only the training run
        needs do not report after it."""
        self._last: dict[str, tuple[float, float]] = {}
        """Actor -> time and busy seconds of the actor's last report."""
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            ActorStarted: self._on_started,
            ActorFailed: self._on_failed,
            ActorReported: self._on_reported,
        }

    def gauges(self, role: str) -> dict[str, float]:
        """Return the gauges of a role, each summed over the role's actors."""
        total: dict[str, float] = {}
        for view in self._actors.values():
            if view.role == role:
                for name, value in view.gauges.items():
                    total[name] = total.get(name, 0.0) + value
        return total

    def explain(self, now: float, quiet_s: float, *, is_over: bool) -> StallView:
        """Return what the run waits for; a finished run waits for nothing."""
        for view in self._actors.values():
            view.is_reporting = is_reporting(view, now)
            view.has_ended = view.at <= self.service_since
        # Actors of a finished run are gone; their last waits must not look like a stall.
        if is_over:
            return StallView(words="the run is finished")
        known = {name: view for name, view in self._actors.items() if not view.has_ended}
        return explain(known, now, quiet_s)

    def _on_started(self, event: ActorStarted, at: float) -> None:
        view = self._view(event.actor)
        view.pid = event.pid
        view.num_starts += 1
        view.at = max(view.at, at)
        # Busy seconds count from 0 again after a start.
        self._last.pop(event.actor, None)

    def _on_failed(self, event: ActorFailed, at: float) -> None:
        if event.actor in self._actors:
            self._actors[event.actor].last_error = event.error[:ERROR_CHARS_MAX]

    def _on_reported(self, event: ActorReported, at: float) -> None:
        view = self._view(event.actor)
        last_at, last_busy_s = self._last.get(event.actor, (event.at - event.uptime_s, 0.0))
        self._last[event.actor] = (event.at, event.busy_s)
        # A report that was stored twice has no time in between.
        if event.at > last_at:
            recent = (event.busy_s - last_busy_s) / (event.at - last_at)
            view.busy_fraction_recent = min(1.0, max(0.0, recent))
        view.role, view.at, view.uptime_s = event.role, event.at, event.uptime_s
        view.busy_fraction = min(1.0, event.busy_s / event.uptime_s) if event.uptime_s else 0.0
        view.num_handled, view.num_queued = event.num_handled, event.num_queued
        for name in CUMULATIVE_GAUGES:
            if name in event.gauges:
                value, before = event.gauges[name], view.gauges.get(name, 0.0)
                # A smaller value than before means that the actor restarted and counts from 0.
                added = value - before if value >= before else value
                view.totals[name] = view.totals.get(name, 0.0) + added
        view.gauges = event.gauges
        view.waits = sorted(event.waits, key=lambda wait: wait.since)[:NUM_WAITS_SHOWN]

    def _view(self, name: str) -> ActorView:
        return self._actors.setdefault(name, ActorView())


NUM_METRICS_MAX = 56
"""Largest number of metrics kept per step, to keep the state small; the trainer reports fewer."""
DIGITS = 6
"""Significant digits kept of each metric, which keeps the state small."""
NUM_STEPS_MAX = 180
"""Largest number of points in the curve of steps, which keeps the state small."""


class LearningViews:
    """Fold of the reports of the trainer, the pacer and the evaluator."""

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
        """Update the medians and percentiles over steps."""
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
        # Not every report measures the held-out loss; keep the last one measured.
        view.heldout_loss = event.heldout_loss or view.heldout_loss
        view.num_saves = event.num_saves
        # JSON has no NaN or infinity.
        if math.isfinite(event.loss):
            point = MidtrainPoint(
                num_tokens=event.num_tokens, loss=event.loss, heldout_loss=event.heldout_loss
            )
            append_thinned(view.points, point)

    def _midtrain_completed(self, event: MidtrainCompleted, at: float) -> None:
        view = self._state.midtrain
        # Streams are read side by side: the end of the run may have been read before this event.
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


NUM_LOG_LINES_MAX = 200
"""Number of lines in the log tail."""
NUM_LEDGER_ROWS_MAX = 64
"""Number of ledger rows shown, those of the newest versions."""
NUM_QUARANTINED_SHOWN = 64
"""Number of quarantined items shown, the newest."""
NUM_VIOLATIONS_SHOWN = 8
"""Number of ledger violations shown, the first."""
_PROGRESS_EVENTS = (TurnSampled, RolloutFinished, Verdict, StepCompleted, MidtrainProgressed)
"""Types of events that show that the run makes progress."""


class RunFold:
    """Fold of a run's events into its view model."""

    def __init__(self) -> None:
        self._state = MonitorState()
        self._ledger = Ledger()
        self._tasks = TaskViews(self._state.tasks)
        self._learning = LearningViews(self._state, self._tasks)
        self._regions = RegionViews(self._state)
        self._behavior = BehaviorViews(self._state.behavior)
        self._actors = ActorViews(self._state.actors)
        self._compute = ComputeViews(self._state.compute)
        self._boots_ms: deque[float] = deque(maxlen=NUM_SAMPLES_MAX)
        self._backends: set[str] = set()
        self._isolation_classes: set[str] = set()
        self._moved_at = 0.0
        self.last_at = 0.0
        """Time at which the newest event was stored, Unix seconds."""
        self._live_reward_sum = 0.0
        self._ledger_changed = False
        self._handlers: dict[type[Event], Callable[[Any, float], None]] = {
            RunStarted: self._run_started,
            RunFinished: self._run_finished,
            RunOpened: self._run_opened,
            MessageRejected: self._message_rejected,
            ItemCharged: self._item_charged,
            LogArchived: self._log_archived,
            ItemQuarantined: self._item_quarantined,
            TurnSampled: self._turn_sampled,
            RolloutFinished: self._rollout_finished,
            Verdict: self._verdict,
            EvalAnnounced: self._eval_announced,
            BatchManifest: self._manifest,
            InferenceRecorded: self._inference_recorded,
            InferenceCounted: self._inference_counted,
            FeedbackReceived: self._feedback_received,
            FeedbackRetracted: self._feedback_retracted,
            LiveSampleJoined: self._live_joined,
            PreferencePair: self._preference_made,
            Label: self._preference_made,
            **self._learning.handlers,
            **self._tasks.handlers,
            **self._regions.handlers,
            **GateViews(self._state.gates).handlers,
            **self._actors.handlers,
            **self._compute.handlers,
        }

    @property
    def types(self) -> tuple[type[Event], ...]:
        """Event types that the fold reads."""
        return tuple({**self._handlers, **dict.fromkeys(DESCRIBED_EVENTS)})

    def apply(self, event: Event, at: float) -> None:
        """Apply one event that was stored at `at` (Unix seconds)."""
        if handler := self._handlers.get(type(event)):
            handler(event, at)
        self.last_at = max(self.last_at, at)
        # Only skipped steps concern the ledger: the tokens of their batch trained nothing.
        if isinstance(event, StepCompleted) and event.skipped:
            self._ledger.add_step(event)
            self._ledger_changed = True
        if isinstance(event, _PROGRESS_EVENTS):
            self._moved_at = max(self._moved_at, at)
        if isinstance(event, ActorReported):
            self._compute.add_report(event)
        elif line := describe(event, at):
            append_tail(self._state.log, line, NUM_LOG_LINES_MAX)

    def state(self, now: float) -> MonitorState:
        """Return the state at `now` (Unix seconds).

        The object is live: later events change it.
        """
        state = self._state
        state.run.now = now
        if state.run.phase == "starting" and state.midtrain.num_tokens:
            state.run.phase = "midtrain"
        # Only after a change, as summing the ledger takes time in proportion to the run.
        if self._ledger_changed:
            state.ledger = _ledger_view(self._ledger)
            self._ledger_changed = False
        self._regions.measure_lag(now)
        self._regions.measure_medians()
        self._learning.measure_medians()
        self._behavior.measure()
        started_at, ended_at = state.run.rl_started_at, state.run.finished_at
        self._compute.measure(started_at, ended_at, _tokens(state))
        state.sandbox.boot_ms_p50 = median_or_none(self._boots_ms) or 0.0
        state.sandbox.gauges = self._actors.gauges("sandbox_host")
        is_over = state.run.phase == "finished"
        # Before the first progress, the time counts from the start of the run.
        since = self._moved_at or state.run.started_at or now
        # A service without requests is idle, not stalled.
        may_be_quiet = is_over or state.run.phase == "serving"
        quiet_s = 0.0 if may_be_quiet else max(0.0, now - since)
        state.stall = self._actors.explain(now, quiet_s, is_over=is_over)
        if not is_over:
            state.stall = weight_backpressure(state) or state.stall
        return state

    def _run_started(self, event: RunStarted, at: float) -> None:
        run = self._state.run
        run.run_id, run.seed, run.versions = event.run_id, event.seed, event.versions
        run.started_at, run.cached = at, list(event.cached)

    def _run_finished(self, event: RunFinished, at: float) -> None:
        self._state.run.phase = "finished"
        self._state.run.finish_reason = event.reason
        self._state.run.is_given_up = event.is_failure
        self._state.run.finished_at = at

    def _run_opened(self, event: RunOpened, at: float) -> None:
        self._actors.service_since = at if event.is_service else 0.0
        if event.is_service:
            self._state.run.phase = "serving"
        elif self._state.run.phase == "serving":
            self._state.run.phase = "finished" if self._state.run.finished_at else "rl"

    def _message_rejected(self, event: MessageRejected, at: float) -> None:
        self._state.run.num_rejected += 1

    def _log_archived(self, event: LogArchived, at: float) -> None:
        self._state.streams[str(event.of)] = StreamView(
            fill_ratio=event.num_bytes / event.bytes_max if event.bytes_max else 0.0,
            num_events=event.num_events,
            archived_to=event.last,
        )

    def _item_charged(self, event: ItemCharged, at: float) -> None:
        self._state.charges.num_proven += event.is_proven
        self._state.charges.num_suspected += not event.is_proven

    def _item_quarantined(self, event: ItemQuarantined, at: float) -> None:
        view = self._state.charges
        view.num_quarantined += 1
        charge = ChargeView(item=event.item, task_id=event.task_id, cause=event.cause, at=at)
        append_tail(view.quarantined, charge, NUM_QUARANTINED_SHOWN)

    def _turn_sampled(self, event: TurnSampled, at: float) -> None:
        self._ledger.add_turn(event)
        self._ledger_changed = True

    def _rollout_finished(self, event: RolloutFinished, at: float) -> None:
        view = self._state.rollouts
        view.num_finished += 1
        # Turns that a branch shares with its trunk are counted once, with the trunk.
        turns = event.own_turns
        view.num_turns += len(turns)
        view.num_sampled_tokens += sum(turn.num_sampled for turn in turns)
        summaries = [turn for turn in turns if turn.is_summary]
        view.num_summaries += len(summaries)
        view.num_summary_tokens += sum(turn.num_sampled for turn in summaries)
        if event.purpose is Purpose.TRAIN:
            view.num_train += 1
            view.num_train_turns += len(event.turns)
            view.num_train_segments += event.num_segments
        view.num_calls += event.num_calls
        view.num_invalid_calls += event.num_invalid_calls
        view.ends[event.end] = view.ends.get(event.end, 0) + 1
        self._behavior.finished(event)
        self._count_machine(event.sandbox)

    def _verdict(self, event: Verdict, at: float) -> None:
        self._behavior.judged(event)
        self._tasks.judged(event)
        if event.purpose is Purpose.TRAIN:
            outcomes = self._state.rollouts.outcomes
            outcomes[event.outcome] = outcomes.get(event.outcome, 0) + 1
        add_verdict(self._state.judges, event)
        self._count_machine(event.sandbox)

    def _count_machine(self, record: SandboxRecord | None) -> None:
        if record is None:
            return
        view = self._state.sandbox
        self._backends.add(record.backend)
        self._isolation_classes.add(record.isolation_class)
        view.backend = "+".join(sorted(self._backends))
        view.isolation_class = "+".join(sorted(self._isolation_classes))
        view.num_vms += 1
        if record.boot_ms > 0:
            self._boots_ms.append(record.boot_ms)

    def _eval_announced(self, event: EvalAnnounced, at: float) -> None:
        self._behavior.announced(event)

    def _manifest(self, event: BatchManifest, at: float) -> None:
        self._ledger.add_manifest(event)
        self._ledger_changed = True
        self._state.live.num_trained += sum(
            sample.outcome.is_trained and not sample.is_change for sample in event.live
        )

    def _inference_recorded(self, event: InferenceRecorded, at: float) -> None:
        if event.is_external:
            self._state.live.num_external += 1
            return
        self._state.live.num_requests += 1
        self._state.live.num_consented += int(event.training_consent)

    def _inference_counted(self, event: InferenceCounted, at: float) -> None:
        self._state.live.num_requests += 1
        self._state.live.num_counted += 1

    def _feedback_received(self, event: FeedbackReceived, at: float) -> None:
        self._state.live.num_feedback += int(not event.amends)

    def _feedback_retracted(self, event: FeedbackRetracted, at: float) -> None:
        self._state.live.num_retracted += 1

    def _preference_made(self, event: PreferencePair | Label, at: float) -> None:
        self._ledger.preferences.add(event)
        self._ledger_changed = True

    def _live_joined(self, event: LiveSampleJoined, at: float) -> None:
        self._ledger.add_live(event)
        self._ledger_changed = True
        # A revision replaces the reward of a sample that is already counted.
        if event.revision:
            return
        live = self._state.live
        live.num_joined += 1
        self._live_reward_sum += event.reward
        live.reward_mean = self._live_reward_sum / live.num_joined


def _ledger_view(ledger: Ledger) -> LedgerView:
    rows, violations = ledger.rows(), ledger.violations
    newest = sorted(rows)[-NUM_LEDGER_ROWS_MAX:]
    preferences = ledger.preferences.totals()
    return LedgerView(
        totals=ledger.totals(),
        rows={version: rows[version] for version in newest},
        balanced=not violations,
        violations=violations[:NUM_VIOLATIONS_SHOWN],
        num_violations=len(violations),
        preferences=preferences if preferences["made"] else {},
    )


def _tokens(state: MonitorState) -> dict[str, dict[str, int]]:
    """Return the number of tokens processed, by group of roles and what was done with them."""

    def summed_gauge(gauge: str) -> int:
        return int(sum(view.totals.get(gauge, 0.0) for view in state.actors.values()))

    return {
        "trainer": {
            "mid_trained": state.midtrain.num_tokens,
            "read": int(state.training.tokens_read),
            "trained": state.ledger.totals.trained,
        },
        "generators": {
            "sampled": summed_gauge("generated_tokens"),
            "prefilled": summed_gauge("prefill_tokens"),
        },
        "judge": {
            "read": sum(view.num_prompt_tokens for view in state.judges.values()),
            "sampled": sum(view.num_reply_tokens for view in state.judges.values()),
        },
    }
