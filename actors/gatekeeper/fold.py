"""The gatekeeper's state, folded from the log: candidates, channels, drift and gates. Pure.

Every reader of the log reaches the same decisions. A decision's subject contains the candidate's
number, so the first one published stands and a second gatekeeper changes nothing. A gatekeeper that
is killed between a decision and the move of the channel makes the move after its restart.

`DriftGates` measures how far the candidate is from stable. At each step the trainer computes the
logprobs of users' tokens under the version it trains from, next to those recorded by the version
that sampled them (`StepCompleted.drift`); the step that trains from the candidate thus compares the
candidate with stable.

`Candidates` tracks which version is the candidate and where the channels point:

```
            chosen ─────────▶ its channel moved ─▶ started ─────────▶ decided ─▶ stable moved
 (newest published)                                                     (only if promoted)
```
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.gatekeeper.experiment import Experiment
from penstock.actors.gatekeeper.offline import OfflineGates
from penstock.messages.base import Event
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import (
    Arm,
    CandidateChosen,
    Decision,
    ExperimentDecided,
    ExperimentStarted,
    ExperimentView,
    Gate,
    GateState,
    parse_variant,
)
from penstock.messages.generation import ChannelMoved
from penstock.messages.reward import EvalAnnounced, EvalCompleted, Verdict
from penstock.messages.training import BatchManifest, StepCompleted, VersionDrift
from penstock.messages.weights import WeightsPublished

NUM_STEPS_MAX = 4096
"""Largest number of steps whose drift is kept."""


class DriftGates:
    """The guards `kl` and `ess`, which measure the drift of the candidate from stable."""

    def __init__(self, config: GatekeeperConfig) -> None:
        self._config = config
        self._steps: OrderedDict[int, dict[int, VersionDrift]] = OrderedDict()
        """Version trained from -> version that sampled -> drift between them."""

    def add(self, event: StepCompleted) -> None:
        """Record the drift that a step measured."""
        if event.drift:
            self._steps[event.step - 1] = event.drift
            if len(self._steps) > NUM_STEPS_MAX:
                self._steps.popitem(last=False)

    def gates(self, candidate: int, stable: int) -> list[Gate]:
        """Return both gates, averaged over tokens of stable from the candidate's step on."""
        needed = max(self._config.guard(name).num_min for name in ("kl", "ess"))
        num, kl, ess = 0, 0.0, 0.0
        for version, by_sampler in self._steps.items():
            # Only as many steps as are needed: later ones train from versions further from stable
            # than the candidate is.
            is_counted = version >= candidate and num < needed
            if is_counted and (drift := by_sampler.get(stable)) is not None:
                num += drift.num_tokens
                kl += drift.kl * drift.num_tokens
                ess += drift.ess * drift.num_tokens
        return [
            self._gate("kl", kl / max(1, num), 0.0, num, is_bad_above=True),
            self._gate("ess", ess / num if num else 1.0, 1.0, num, is_bad_above=False),
        ]

    def _gate(
        self, name: str, value: float, baseline: float, num_tokens: int, *, is_bad_above: bool
    ) -> Gate:
        settings = self._config.guard(name)
        is_bad = value > settings.bound if is_bad_above else value < settings.bound
        words = f"{value:.3g}, bound {settings.bound:g}"
        state = GateState.FAILED if is_bad else GateState.PASSED
        if num_tokens < settings.num_min:
            state = GateState.WAITING
            words = f"{words}; {num_tokens} of {settings.num_min} tokens sampled by stable"
        return Gate(
            name=name,
            state=state,
            words=words,
            value=value,
            baseline=baseline,
            bound=settings.bound,
            num_candidate=num_tokens,
        )


class Candidates:
    """The newest candidate, the newest decision, and the positions of the channels."""

    def __init__(self) -> None:
        """Start without candidates."""
        self.chosen: CandidateChosen | None = None
        """Newest candidate; open until it is decided."""
        self.started: ExperimentStarted | None = None
        """Newest experiment that was started."""
        self.decided: ExperimentDecided | None = None
        """Newest decision."""
        self.newest = -1
        """Newest published version; -1 before the first."""
        self.channels: dict[str, int] = {}
        self.num_moves = 0
        self._moved_for: dict[str, int] = {}
        """Channel -> number of the newest candidate for which it was moved."""
        self._is_overruled = False
        """Whether a person has moved a channel since the candidate was chosen."""

    @property
    def is_open(self) -> bool:
        """Whether a candidate is chosen and not decided."""
        return self.chosen is not None and not self._is_decided(self.chosen.number)

    @property
    def next_number(self) -> int:
        """The number of the next candidate."""
        return self.chosen.number + 1 if self.chosen else 0

    def is_moved(self, arm: Arm, number: int) -> bool:
        """Return whether a channel was moved for a candidate or a later one."""
        return self._moved_for.get(arm.value, -1) >= number

    @property
    def promotion(self) -> ExperimentDecided | None:
        """Promotion for which `stable` must still be moved; None if there is none."""
        last = self.decided
        # A person who moved a channel after the decision has the last word.
        if last is None or last.decision is not Decision.PROMOTED or self._is_overruled:
            return None
        return None if self.is_moved(Arm.STABLE, last.number) else last

    @property
    def is_overruled(self) -> bool:
        """Whether a person has moved a channel while the candidate is open."""
        return self.is_open and self._is_overruled

    def published(self, policy_version: int) -> None:
        """Record a published version."""
        self.newest = max(self.newest, policy_version)

    def choose(self, event: CandidateChosen) -> None:
        """Record a candidate; ignore one that was already chosen."""
        if event.number >= self.next_number:
            self.chosen, self._is_overruled = event, False

    def start(self, event: ExperimentStarted) -> None:
        """Record the start of an experiment."""
        self.started = event

    def decide(self, event: ExperimentDecided) -> None:
        """Record a decision."""
        self.decided = event

    def moved(self, event: ChannelMoved) -> None:
        """Record a move of a channel; ignore one that was already applied."""
        if event.number < self.num_moves:
            return
        self.num_moves, self.channels = event.number + 1, event.channels
        # Moves made by hand carry no candidate.
        if event.candidate_number < 0:
            self._is_overruled = True
        else:
            self._moved_for[event.channel] = event.candidate_number

    def _is_decided(self, number: int) -> bool:
        return self.decided is not None and self.decided.number >= number


class GateFold:
    """Complete state of the gatekeeper: the candidate, its gates and its experiment."""

    def __init__(self, config: GatekeeperConfig, judge: str) -> None:
        """Start with an empty log.

        Args:
            config: Gatekeeper settings.
            judge: Name of the judge whose verdicts count in evaluations.

        """
        self._config = config
        self.candidates = Candidates()
        self.offline = OfflineGates(config, judge)
        self.drift = DriftGates(config)
        self.experiment = Experiment(-1, config)
        """Newest experiment that was started or has users."""
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            CandidateChosen: self.candidates.choose,
            ExperimentStarted: self._started,
            ExperimentDecided: self.candidates.decide,
            ChannelMoved: self.candidates.moved,
            WeightsPublished: self._published,
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
        """Event types that the fold reads."""
        return tuple(self._handlers)

    def apply(self, event: Event) -> None:
        """Apply one event of the log."""
        self._handlers[type(event)](event)

    def offline_gates(self, num_tasks: int) -> list[Gate]:
        """Return the gates to pass before users are served by the candidate."""
        chosen = self.candidates.chosen
        assert chosen is not None, "there is no candidate"
        paired = self.offline.paired_gate(chosen.policy_version, chosen.stable_version, num_tasks)
        return [self.offline.quality_gate(), paired]

    def gates(self, num_tasks: int) -> list[Gate]:
        """Return all gates of the candidate, the offline ones first."""
        chosen = self.candidates.chosen
        assert chosen is not None, "there is no candidate"
        drift = self.drift.gates(chosen.policy_version, chosen.stable_version)
        return [*self.offline_gates(num_tasks), *drift, *self._experiment_of(chosen.number).gates()]

    def view(self, num_tasks: int) -> ExperimentView | None:
        """Return the state of the newest candidate; None before the first."""
        chosen, decided = self.candidates.chosen, self.candidates.decided
        if chosen is None:
            return None
        experiment = self._experiment_of(chosen.number)
        is_decided = decided is not None and decided.number == chosen.number
        # A decided candidate keeps the gates of its decision: users may still rate old sessions.
        gates = decided.gates if is_decided and decided else self.gates(num_tasks)
        low, high = experiment.bounds()
        better, worse = experiment.evidence
        num_missing, seconds_missing = experiment.missing(self._config.test.effect)
        robust = {arm: estimates.doubly_robust for arm, estimates in experiment.estimates.items()}
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
        """Return the experiment of a candidate, or a newer one; create it if there is none."""
        if self.experiment.number < number:
            self.experiment = Experiment(number, self._config)
        return self.experiment

    def _published(self, event: WeightsPublished) -> None:
        self.candidates.published(event.policy_version)

    def _started(self, event: ExperimentStarted) -> None:
        self.candidates.start(event)
        self._experiment_of(event.number)

    def _recorded(self, event: InferenceRecorded) -> None:
        # A record may arrive before the start of its experiment, which is on another stream.
        if variant := parse_variant(event.variant):
            self._experiment_of(variant.number).add_record(event)

    def _joined(self, event: LiveSampleJoined) -> None:
        if variant := parse_variant(event.variant):
            self._experiment_of(variant.number).add_sample(event)

    def _manifest(self, event: BatchManifest) -> None:
        if any(sample.outcome.is_trained for sample in event.live):
            self.offline.live_trained(event.policy_version)
        self.experiment.add_settled(event.live)


def blocked_by(gates: list[Gate]) -> str:
    """Return the most severe reason that blocks promotion; empty if there is none."""
    for state in (GateState.REJECTED, GateState.FAILED, GateState.WAITING):
        for gate in gates:
            if gate.state is state:
                return f"{gate.name}: {gate.words}"
    return ""
