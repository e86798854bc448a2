"""Where processor time and tokens go: by role, over the whole run and since mid-training."""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.actors.monitor.curves import append_thinned
from penstock.messages.base import Event
from penstock.messages.telemetry import ActorReported, ProcessorUsed

NUM_POINTS_MAX = 64
"""Of an actor's curve; the time since mid-training is read off between two of them."""
_GROUPS = {
    "trainer": "trainer",
    "publisher": "trainer",
    "generator": "generators",
    "receiver": "generators",
    "rollout_worker": "workers",
    "sandbox_host": "sandboxes",
    "sandbox": "sandboxes",  # its name in logs of former releases
    "judge": "judge",
    "gateway": "front",
    "monitor": "front",
    "launcher": "launcher",
    "nats-server": "event log",
}
"""Roles that are counted together; the others are `control`."""


class RoleCompute(msgspec.Struct, kw_only=True):
    """What one kind of roles took."""

    processor_s: float = 0.0
    """Of all processors, over all starts; of sandboxes, machines that have ended included."""
    rl_processor_s: float = 0.0
    """Of these, from the end of mid-training to the last step, as the wall clock of RL: with the
    evaluation before the first step, without the one after the last."""
    share: float = 0.0
    """Of the whole run's."""
    rl_share: float = 0.0
    tokens: dict[str, int] = {}
    """What it read, sampled or trained."""


class ComputeView(msgspec.Struct, kw_only=True):
    """Processor seconds and tokens, and their split."""

    processor_s: float = 0.0
    rl_processor_s: float = 0.0
    machines_s: float = 0.0
    """Of machines alone; part of the sandboxes'."""
    roles: dict[str, RoleCompute] = {}


class ComputeViews:
    """Folds what processes report; a report, kept in memory, and a record, kept for good, agree."""

    def __init__(self, view: ComputeView) -> None:
        self._view = view
        self._group_of: dict[str, str] = {}
        self._used_s: dict[str, dict[str, float]] = {}
        """Actor -> kind -> seconds, where their sum is the most so far: what an engine's process
        has used is its parent's once it has ended."""
        self._curves: dict[str, list[tuple[float, float]]] = {}
        """Actor -> unix seconds, and all its processor seconds by then."""
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {ProcessorUsed: self._take}

    def add_report(self, event: ActorReported) -> None:
        """See an actor's report."""
        if event.processor_s:
            self._take(event, event.at)

    def measure(
        self, rl_started_at: float, rl_ended_at: float, tokens: dict[str, dict[str, int]]
    ) -> None:
        """Set the view.

        Args:
            rl_started_at: End of mid-training, unix seconds; 0 before it.
            rl_ended_at: The last step, unix seconds; 0 before it.
            tokens: Kind of roles -> what was done -> tokens.

        """
        roles = {name: RoleCompute(tokens=counts) for name, counts in tokens.items()}
        for actor, used_s in self._used_s.items():
            role = roles.setdefault(self._group_of[actor], RoleCompute())
            total_s = sum(used_s.values())
            role.processor_s += total_s
            if rl_started_at:
                by_end_s = self._by(actor, rl_ended_at) if rl_ended_at else total_s
                role.rl_processor_s += by_end_s - self._by(actor, rl_started_at)
        view = self._view
        view.machines_s = sum(used_s.get("machines", 0.0) for used_s in self._used_s.values())
        view.processor_s = sum(role.processor_s for role in roles.values())
        view.rl_processor_s = sum(role.rl_processor_s for role in roles.values())
        for role in roles.values():
            role.share = role.processor_s / max(view.processor_s, 1e-9)
            role.rl_share = role.rl_processor_s / max(view.rl_processor_s, 1e-9)
        by_time = sorted(roles.items(), key=lambda item: -item[1].processor_s)
        view.roles = dict(by_time)

    def _take(self, event: ActorReported | ProcessorUsed, at: float) -> None:
        name = event.actor
        self._group_of[name] = _GROUPS.get(event.role, "control")
        known = self._used_s.setdefault(name, {})
        if sum(event.processor_s.values()) > sum(known.values()):
            known = self._used_s[name] = event.processor_s
        curve = self._curves.setdefault(name, [])
        append_thinned(curve, (at, sum(known.values())), NUM_POINTS_MAX)

    def _by(self, actor: str, at: float) -> float:
        """Return what an actor had used by a time, between the points of its curve."""
        before = (at, 0.0)
        for point in sorted(self._curves[actor]):
            if point[0] >= at:
                length_s = point[0] - before[0]
                part = (at - before[0]) / length_s if length_s > 0 else 1.0
                return before[1] + part * (point[1] - before[1]) if before[1] else point[1]
            before = point
        return before[1]
