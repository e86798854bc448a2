"""Everything the gatekeeper knows is a fold of the log, and every decision follows from it. Pure.

All readers of the log come to the same decision, and the one that is published first stands, as its
subject is the candidate's number. So two gatekeepers are no more than one, and one that is killed
between a decision and the move of the channel makes up for the move when it is back.

How far the candidate's weights are from the stable version, on what stable sampled. Pure.

The trainer computes, for each step, the logprobs of users' tokens under the version that it trains
from, beside those of the version that sampled them (`StepCompleted.drift`): that of the step after
the candidate is the candidate against stable.

Which version is the candidate, and where the channels point: what the log says. Pure.

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
"""Steps whose figures are kept."""


class DriftGates:
    """The guards `kl` and `ess`."""

    def __init__(self, config: GatekeeperConfig) -> None:
        self._config = config
        self._steps: OrderedDict[int, dict[int, VersionDrift]] = OrderedDict()
        """Version trained from -> version that sampled -> figures."""

    def add(self, event: StepCompleted) -> None:
        """Take a step's figures."""
        if event.drift:
            self._steps[event.step - 1] = event.drift
            if len(self._steps) > NUM_STEPS_MAX:
                self._steps.popitem(last=False)

    def gates(self, candidate: int, stable: int) -> list[Gate]:
        """Return both guards, over the first steps from the candidate on that read enough.

        Later steps train from versions that are further away, so they are no excuse.
        """
        needed = max(self._config.guard(name).num_min for name in ("kl", "ess"))
        num, kl, ess = 0, 0.0, 0.0
        for version, of in self._steps.items():
            if version >= candidate and (one := of.get(stable)) is not None and num < needed:
                num += one.num_tokens
                kl += one.kl * one.num_tokens
                ess += one.ess * one.num_tokens
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
            words = f"{words}; {num_tokens} of {settings.num_min} tokens of stable were trained"
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
    """The candidate that is open, if one is, and what was decided last."""

    def __init__(self) -> None:
        """Know of nothing."""
        self.chosen: CandidateChosen | None = None
        """The newest; open as long as it is not decided."""
        self.started: ExperimentStarted | None = None
        """Its experiment."""
        self.decided: ExperimentDecided | None = None
        """The newest decision."""
        self.newest = -1
        """Newest version published."""
        self.channels: dict[str, int] = {}
        self.num_moves = 0
        self._moved_for: dict[str, int] = {}
        """Channel -> the newest candidate for which it was moved."""
        self._is_overruled = False
        """Whether a person moved a channel since the candidate was chosen."""

    @property
    def is_open(self) -> bool:
        """Whether a candidate is on its way."""
        return self.chosen is not None and not self._is_decided(self.chosen.number)

    @property
    def next_number(self) -> int:
        """The number of the next candidate."""
        return self.chosen.number + 1 if self.chosen else 0

    def is_moved(self, arm: Arm, number: int) -> bool:
        """Return whether a channel was moved for a candidate."""
        return self._moved_for.get(arm.value, -1) >= number

    @property
    def promotion(self) -> ExperimentDecided | None:
        """The promotion for which `stable` is still to be moved."""
        last = self.decided
        if last is None or last.decision is not Decision.PROMOTED or self._is_overruled:
            return None
        return None if self.is_moved(Arm.STABLE, last.number) else last

    @property
    def is_overruled(self) -> bool:
        """Whether a person moved a channel while the candidate is open."""
        return self.is_open and self._is_overruled

    def published(self, policy_version: int) -> None:
        """See a version."""
        self.newest = max(self.newest, policy_version)

    def choose(self, event: CandidateChosen) -> None:
        """See a candidate."""
        if event.number >= self.next_number:
            self.chosen, self._is_overruled = event, False

    def start(self, event: ExperimentStarted) -> None:
        """See its experiment."""
        self.started = event

    def decide(self, event: ExperimentDecided) -> None:
        """See its end."""
        self.decided = event

    def moved(self, event: ChannelMoved) -> None:
        """See where channels point."""
        if event.number < self.num_moves:
            return
        self.num_moves, self.channels = event.number + 1, event.channels
        if event.candidate_number < 0:
            self._is_overruled = True
        else:
            self._moved_for[event.channel] = event.candidate_number

    def _is_decided(self, number: int) -> bool:
        return self.decided is not None and self.decided.number >= number


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
