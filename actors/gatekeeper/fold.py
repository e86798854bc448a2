"""Everything the gatekeeper knows is a fold of the log, and every decision follows from it. Pure.

All readers of the log come to the same decision, and the one that is published first stands, as its
subject is the candidate's number. So two gatekeepers are no more than one, and one that is killed
between a decision and the move of the channel makes up for the move when it is back.
"""

from collections.abc import Callable
from typing import Any

from penstock.actors.gatekeeper.candidates import Candidates
from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.gatekeeper.drift import DriftGates
from penstock.actors.gatekeeper.experiment import Experiment
from penstock.actors.gatekeeper.offline import OfflineGates
from penstock.messages.base import Event
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import (
    Arm,
    CandidateChosen,
    ExperimentDecided,
    ExperimentStarted,
    ExperimentView,
    Gate,
    GateState,
    parse_variant,
)
from penstock.messages.generation import ChannelMoved
from penstock.messages.reward import EvalAnnounced, EvalCompleted, Verdict
from penstock.messages.training import BatchManifest, StepCompleted
from penstock.messages.weights import WeightsPublished


class GateFold:
    """The candidate, its gates and its experiment."""

    def __init__(self, config: GatekeeperConfig, judge: str) -> None:
        """Know of nothing.

        Args:
            config: Gates and bounds.
            judge: Whose verdicts count in evaluations.

        """
        self._config = config
        self.candidates = Candidates()
        self.offline = OfflineGates(config, judge)
        self.drift = DriftGates(config)
        self.experiment = Experiment(-1, config)
        """The newest whose users were seen, or that was started."""
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            CandidateChosen: self.candidates.choose,
            ExperimentStarted: self._started,
            ExperimentDecided: self.candidates.decide,
            ChannelMoved: self.candidates.moved,
            WeightsPublished: lambda event: self.candidates.published(event.policy_version),
            EvalAnnounced: self.offline.announced,
            EvalCompleted: self.offline.completed,
            Verdict: self.offline.verdict,
            BatchManifest: self._manifest,
            StepCompleted: self.drift.add,
            InferenceRecorded: self._recorded,
            LiveSampleJoined: self._joined,
        }

    @property
    def types(self) -> tuple[type[Event], ...]:
        """All event types that the fold reads."""
        return tuple(self._handlers)

    def apply(self, event: Event) -> None:
        """Fold one event."""
        self._handlers[type(event)](event)

    def offline_gates(self, num_tasks: int) -> list[Gate]:
        """Return the gates that come before any user."""
        chosen = self.candidates.chosen
        assert chosen is not None, "there is no candidate"
        paired = self.offline.paired_gate(chosen.policy_version, chosen.stable_version, num_tasks)
        return [self.offline.quality_gate(), paired]

    def gates(self, num_tasks: int) -> list[Gate]:
        """Return all gates of the candidate, in the order in which they are passed."""
        chosen = self.candidates.chosen
        assert chosen is not None, "there is no candidate"
        drift = self.drift.gates(chosen.policy_version, chosen.stable_version)
        return [*self.offline_gates(num_tasks), *drift, *self._experiment_of(chosen.number).gates()]

    def view(self, num_tasks: int) -> ExperimentView | None:
        """Return the newest candidate in figures; None where there was none."""
        chosen, decided = self.candidates.chosen, self.candidates.decided
        if chosen is None:
            return None
        experiment = self._experiment_of(chosen.number)
        is_decided = decided is not None and decided.number == chosen.number
        gates = decided.gates if is_decided and decided else self.gates(num_tasks)
        low, high = experiment.bounds()
        better, worse = experiment.evidence
        num_missing, seconds_missing = experiment.missing(self._config.test.effect)
        robust = {arm: one.doubly_robust for arm, one in experiment.estimates.items()}
        started = self.candidates.started
        is_started = started is not None and started.number == chosen.number
        phase = "arms" if is_started else "offline"
        versions = {Arm.STABLE: chosen.stable_version, Arm.CANDIDATE: chosen.policy_version}
        return ExperimentView(
            number=chosen.number,
            policy_version=chosen.policy_version,
            stable_version=chosen.stable_version,
            phase=decided.decision.value if is_decided and decided else phase,
            blocked_by="" if is_decided else blocked_by(gates),
            gates=gates,
            arms=experiment.arms(versions),
            difference=robust[Arm.CANDIDATE] - robust[Arm.STABLE],
            difference_low=low,
            difference_high=high,
            evidence_better=better,
            evidence_worse=worse,
            share=self._config.test.share if is_started else 0.0,
            num_sessions_missing=num_missing,
            seconds_missing=seconds_missing,
        )

    def _experiment_of(self, number: int) -> Experiment:
        """Return the experiment of a candidate; one without users where none was seen yet."""
        if self.experiment.number < number:
            self.experiment = Experiment(number, self._config)
        return self.experiment

    def _started(self, event: ExperimentStarted) -> None:
        self.candidates.start(event)
        self._experiment_of(event.number)

    def _recorded(self, event: InferenceRecorded) -> None:
        if variant := parse_variant(event.variant):  # The start is on another stream: maybe later.
            self._experiment_of(variant.number).add_record(event)

    def _joined(self, event: LiveSampleJoined) -> None:
        if variant := parse_variant(event.variant):
            self._experiment_of(variant.number).add_sample(event)

    def _manifest(self, event: BatchManifest) -> None:
        if any(sample.outcome.is_trained for sample in event.live):
            self.offline.live_trained(event.policy_version)
        self.experiment.add_settled(event.live)


def blocked_by(gates: list[Gate]) -> str:
    """Return what blocks promotion, the gravest first; empty where nothing does."""
    for state in (GateState.REJECTED, GateState.FAILED, GateState.WAITING):
        for gate in gates:
            if gate.state is state:
                return f"{gate.name}: {gate.words}"
    return ""
