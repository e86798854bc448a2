"""CPU time and tokens by role, over the whole run and since mid-training."""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.actors.monitor.curves import append_thinned
from penstock.messages.base import Event
from penstock.messages.telemetry import ActorReported, ProcessorUsed

NUM_POINTS_MAX = 64
"""Largest number of points in an actor's curve of CPU time."""
_GROUPS = {
    "trainer": "trainer",
    # In logs of former releases.
    "publisher": "trainer",
    "generator": "generators",
    "receiver": "generators",
    "rollout_worker": "workers",
    "sandbox_host": "sandboxes",
    # Logs of former releases call the sandbox host "sandbox".
    "sandbox": "sandboxes",
    "judge": "judge",
    "gateway": "front",
    "monitor": "front",
    "launcher": "launcher",
    "nats-server": "event log",
}
"""Role -> group in which it is counted; all other roles are counted as `control`."""


class RoleCompute(msgspec.Struct, kw_only=True):
    """CPU time and tokens of one group of roles."""

    processor_s: float = 0.0
    """CPU seconds over all processors and all starts; for sandboxes, including ended machines."""
    rl_processor_s: float = 0.0
    """CPU seconds from the end of mid-training to the last step; includes the evaluation before the
    first step and excludes the one after the last."""
    share: float = 0.0
    """Share of the run's CPU time."""
    rl_share: float = 0.0
    """Share of the run's CPU time from the end of mid-training to the last step."""
    tokens: dict[str, int] = {}
    """Number of tokens read, sampled or trained, by what was done with them."""


class ComputeView(msgspec.Struct, kw_only=True):
    """CPU time and tokens of the run, in total and by group of roles."""

    processor_s: float = 0.0
    """CPU seconds of the whole run."""
    rl_processor_s: float = 0.0
    """CPU seconds from the end of mid-training to the last step."""
    machines_s: float = 0.0
    """CPU seconds of sandbox machines only; included in `sandboxes`."""
    roles: dict[str, RoleCompute] = {}
    """Group of roles -> CPU time and tokens, the largest CPU time first."""


class ComputeViews:
    """Fold of the CPU time that processes report, in reports (in memory) and records (on disk)."""

    def __init__(self, view: ComputeView) -> None:
        self._view = view
        self._group_of: dict[str, str] = {}
        self._used_s: dict[str, dict[str, float]] = {}
        """Actor -> kind -> CPU seconds, from the report with the largest sum so far."""
        self._curves: dict[str, list[tuple[float, float]]] = {}
        """Actor -> (Unix seconds, CPU seconds used by then)."""
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            ProcessorUsed: self._record
        }

    def add_report(self, event: ActorReported) -> None:
        """Record the CPU time in an actor's report."""
        if event.processor_s:
            self._record(event, event.at)

    def measure(
        self, rl_started_at: float, rl_ended_at: float, tokens: dict[str, dict[str, int]]
    ) -> None:
        """Update the view.

        Args:
            rl_started_at: End of mid-training in Unix seconds; 0 before it.
            rl_ended_at: Time of the last step in Unix seconds; 0 before it.
            tokens: Group of roles -> what was done -> number of tokens.

        """
        roles = {name: RoleCompute(tokens=counts) for name, counts in tokens.items()}
        for actor, used_s in self._used_s.items():
            role = roles.setdefault(self._group_of[actor], RoleCompute())
            total_s = sum(used_s.values())
            role.processor_s += total_s
            if rl_started_at:
                by_end_s = self._used_by(actor, rl_ended_at) if rl_ended_at else total_s
                role.rl_processor_s += by_end_s - self._used_by(actor, rl_started_at)
        view = self._view
        view.machines_s = sum(used_s.get("machines", 0.0) for used_s in self._used_s.values())
        view.processor_s = sum(role.processor_s for role in roles.values())
        view.rl_processor_s = sum(role.rl_processor_s for role in roles.values())
        for role in roles.values():
            role.share = role.processor_s / max(view.processor_s, 1e-9)
            role.rl_share = role.rl_processor_s / max(view.rl_processor_s, 1e-9)
        by_time = sorted(roles.items(), key=lambda item: -item[1].processor_s)
        view.roles = dict(by_time)

    def _record(self, event: ActorReported | ProcessorUsed, at: float) -> None:
        name = event.actor
        self._group_of[name] = _GROUPS.get(event.role, "control")
        known = self._used_s.setdefault(name, {})
        # Only an increase counts: the time of an engine's process moves to its parent when it ends,
        # so the split by kind changes, and a report may be older than the last record.
        if sum(event.processor_s.values()) > sum(known.values()):
            known = self._used_s[name] = event.processor_s
        # The curve is kept because mid-training's end is only known later.
        curve = self._curves.setdefault(name, [])
        append_thinned(curve, (at, sum(known.values())), NUM_POINTS_MAX)

    def _used_by(self, actor: str, at: float) -> float:
        """Return an actor's CPU seconds at a time, interpolated between points of its curve."""
        before = (at, 0.0)
        for point in sorted(self._curves[actor]):
            if point[0] >= at:
                length_s = point[0] - before[0]
                part = (at - before[0]) / length_s if length_s > 0 else 1.0
                return before[1] + part * (point[1] - before[1]) if before[1] else point[1]
            before = point
        return before[1]
