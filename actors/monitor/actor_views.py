"""The actors: which report, how busy they are, and what each waits for."""

from collections.abc import Callable
from typing import Any

from penstock.actors.monitor.stall_views import StallView
from penstock.actors.monitor.state import ActorView
from penstock.actors.monitor.wait_graph import explain, is_reporting
from penstock.messages.base import Event
from penstock.messages.control import ActorFailed, ActorStarted
from penstock.messages.telemetry import ActorReported

NUM_WAITS_SHOWN = 4
ERROR_CHARS_MAX = 300
CUMULATIVE_GAUGES = ("engine_busy_s", "digest_mismatches", "generated_tokens", "prefill_tokens")
"""Gauges of generators and receivers that count up from each start."""


class ActorViews:
    """Folds starts, failures and reports."""

    def __init__(self, actors: dict[str, ActorView]) -> None:
        self._actors = actors
        self.service_since = 0.0
        """Start of the service on the run, which does not miss the run's other actors."""
        self._last: dict[str, tuple[float, float]] = {}
        """Actor -> time and busy seconds of its last report."""
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            ActorStarted: self._on_started,
            ActorFailed: self._on_failed,
            ActorReported: self._on_reported,
        }

    def gauges(self, role: str) -> dict[str, float]:
        """Return the gauges of a role, summed over its actors."""
        total: dict[str, float] = {}
        for view in self._actors.values():
            if view.role == role:
                for name, value in view.gauges.items():
                    total[name] = total.get(name, 0.0) + value
        return total

    def explain(self, now: float, quiet_s: float, *, is_over: bool) -> StallView:
        """Return what the run waits for; a finished one waits for nothing."""
        for view in self._actors.values():
            view.is_reporting = is_reporting(view, now)
            view.has_ended = view.at <= self.service_since
        if is_over:
            return StallView(words="the run is finished")
        known = {name: view for name, view in self._actors.items() if not view.has_ended}
        return explain(known, now, quiet_s)

    def _on_started(self, event: ActorStarted, at: float) -> None:
        view = self._view(event.actor)
        view.pid = event.pid
        view.num_starts += 1
        view.at = max(view.at, at)
        self._last.pop(event.actor, None)

    def _on_failed(self, event: ActorFailed, at: float) -> None:
        if event.actor in self._actors:
            self._actors[event.actor].last_error = event.error[:ERROR_CHARS_MAX]

    def _on_reported(self, event: ActorReported, at: float) -> None:
        view = self._view(event.actor)
        last_at, last_busy_s = self._last.get(event.actor, (event.at - event.uptime_s, 0.0))
        self._last[event.actor] = (event.at, event.busy_s)
        if event.at > last_at:
            recent = (event.busy_s - last_busy_s) / (event.at - last_at)
            view.busy_fraction_recent = min(1.0, max(0.0, recent))
        view.role, view.at, view.uptime_s = event.role, event.at, event.uptime_s
        view.busy_fraction = min(1.0, event.busy_s / event.uptime_s) if event.uptime_s else 0.0
        view.num_handled, view.num_queued = event.num_handled, event.num_queued
        for name in CUMULATIVE_GAUGES:
            if name in event.gauges:
                value, before = event.gauges[name], view.gauges.get(name, 0.0)
                added = value - before if value >= before else value
                view.totals[name] = view.totals.get(name, 0.0) + added
        view.gauges = event.gauges
        view.waits = sorted(event.waits, key=lambda wait: wait.since)[:NUM_WAITS_SHOWN]

    def _view(self, name: str) -> ActorView:
        return self._actors.setdefault(name, ActorView())
