"""Supervision as in OTP: when to restart what failed, and when to give up.

The unit of failure is an operating-system process: actors that need each other (a generator and its
receiver share one engine) share a process, and an actor that fails takes its process down. The
launcher restarts processes one for one, within this policy.

Source: Erlang/OTP, Supervision Principles: restart intensity and period.
"""

from collections import deque
from enum import StrEnum


class Decision(StrEnum):
    """What to do about a failure."""

    RESTART = "restart"
    """The one that failed."""
    ESCALATE = "escalate"
    """Give up: it is for whoever supervises the supervisor."""


class RestartPolicy:
    """Decides; owns no task, no clock. More than `intensity` failures in `period_s` escalate."""

    def __init__(self, *, intensity: int, period_s: float) -> None:
        self._intensity = intensity
        self._period_s = period_s
        self._failures: deque[float] = deque()

    def on_failure(self, now: float) -> Decision:
        """Count one failure of a child at `now` seconds, and say what to do."""
        self._failures.append(now)
        while self._failures[0] < now - self._period_s:
            self._failures.popleft()
        return Decision.ESCALATE if len(self._failures) > self._intensity else Decision.RESTART
