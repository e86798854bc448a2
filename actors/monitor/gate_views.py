"""View of the channels and of the candidate with its gates and arms: a section of the page."""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.messages.base import Event
from penstock.messages.gates import (
    CandidateChosen,
    ExperimentDecided,
    ExperimentStarted,
    ExperimentView,
    GateEvaluated,
)
from penstock.messages.generation import ChannelMoved

NUM_DECIDED_SHOWN = 16
"""Number of decisions shown, the newest."""


class DecisionView(msgspec.Struct, kw_only=True):
    """The decision on one candidate."""

    number: int
    policy_version: int
    stable_version: int
    decision: str
    reason: str
    at: float
    """Time of the decision, Unix seconds."""


class GatesView(msgspec.Struct, kw_only=True):
    """The release gates between training and users."""

    channels: dict[str, int] = {}
    """Channel -> version, for channels that were moved at least once."""
    candidate: ExperimentView | None = None
    """Newest candidate; None before the first."""
    decided: list[DecisionView] = []
    """Newest decisions, the latest last."""


class GateViews:
    """Fold of the gatekeeper's events and reports.

    Reports are telemetry, which is lost when the server stops. Without them the candidate is shown
    with what the log has.
    """

    def __init__(self, view: GatesView) -> None:
        self._view = view
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            ChannelMoved: self._moved,
            CandidateChosen: self._chosen,
            ExperimentStarted: self._started,
            GateEvaluated: self._evaluated,
            ExperimentDecided: self._decided,
        }

    def _moved(self, event: ChannelMoved, at: float) -> None:
        self._view.channels = event.channels

    def _chosen(self, event: CandidateChosen, at: float) -> None:
        # A report on this candidate, which has more detail, may have arrived first.
        if event.number > self._number:
            self._view.candidate = ExperimentView(
                number=event.number,
                policy_version=event.policy_version,
                stable_version=event.stable_version,
                phase="offline",
            )

    def _started(self, event: ExperimentStarted, at: float) -> None:
        shown = self._view.candidate
        if shown is not None and shown.number == event.number and shown.phase == "offline":
            self._view.candidate = msgspec.structs.replace(shown, phase="arms", share=event.share)

    def _evaluated(self, event: GateEvaluated, at: float) -> None:
        """Show a report, unless there is a newer candidate or this one is decided."""
        last = max((decision.number for decision in self._view.decided), default=-1)
        if event.view.number >= self._number and event.view.number > last:
            self._view.candidate = event.view

    def _decided(self, event: ExperimentDecided, at: float) -> None:
        decided = DecisionView(
            number=event.number,
            policy_version=event.policy_version,
            stable_version=event.stable_version,
            decision=event.decision,
            reason=event.reason,
            at=at,
        )
        self._view.decided = [*self._view.decided, decided][-NUM_DECIDED_SHOWN:]
        shown = self._view.candidate
        if shown is not None and shown.number == event.number:
            self._view.candidate = msgspec.structs.replace(
                shown, phase=event.decision, blocked_by="", gates=event.gates or shown.gates
            )

    @property
    def _number(self) -> int:
        """Number of the candidate that is shown; -1 if none is."""
        return self._view.candidate.number if self._view.candidate else -1
