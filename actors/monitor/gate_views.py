"""Channels, the candidate, its gates and its arms: a section of the page."""

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


class DecisionView(msgspec.Struct, kw_only=True):
    """How one candidate ended."""

    number: int
    policy_version: int
    stable_version: int
    decision: str
    reason: str
    at: float
    """Unix seconds."""


class GatesView(msgspec.Struct, kw_only=True):
    """What is between training and users."""

    channels: dict[str, int] = {}
    """Channel -> version, of those that were ever moved."""
    candidate: ExperimentView | None = None
    """The newest; None where nothing was chosen."""
    decided: list[DecisionView] = []
    """The newest."""


class GateViews:
    """Folds what the gatekeeper says.

    Its reports are telemetry, which ends with the server; without them the candidate is shown as
    the log alone has it.
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
        if event.number > self._number:  # A report of it may have come before.
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
        """Show a report, unless a newer candidate is there, or this one is decided."""
        last = max((one.number for one in self._view.decided), default=-1)
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
        """Of the candidate that is shown; -1 where none is."""
        return self._view.candidate.number if self._view.candidate else -1
