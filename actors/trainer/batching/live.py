"""Users' samples waiting for the next step: REINFORCE with a running baseline. Pure."""

import msgspec

from penstock.actors.trainer.batching.groups import merge_spans
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.objective.advantages import RunningBaseline
from penstock.messages.feedback import FeedbackRetracted, LiveSampleJoined
from penstock.messages.reward import Outcome
from penstock.messages.training import BatchManifest, SampleEntry


class LiveSamples:
    """Joined samples by request, in the order they came, and the baseline."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._entries: dict[str, SampleEntry] = {}
        self._tenants: dict[str, str] = {}
        self._settled: set[str] = set()
        self._retracted: set[tuple[str, str]] = set()
        """Tenant and request: nobody withdraws another tenant's sample."""
        self.baseline = RunningBaseline(momentum=config.live.baseline_momentum)

    def add(self, event: LiveSampleJoined) -> None:
        """Put a sample in, unless it was settled already."""
        if event.sample_id in self._settled:
            return
        outcome = Outcome.SOLVED if event.reward > 0 else Outcome.FAILED
        if (event.tenant, event.sample_id) in self._retracted:
            outcome = Outcome.CANCELLED
        self._tenants[event.sample_id] = event.tenant
        self._entries[event.sample_id] = SampleEntry(
            rollout_id=event.sample_id,
            revision=event.revision,
            outcome=outcome,
            reward=event.reward,
            advantage=0.0,
            version_spans=merge_spans(span for turn in event.turns for span in turn.version_spans),
        )

    def retract(self, event: FeedbackRetracted) -> None:
        """Withdraw: an untrained sample is accounted for as cancelled in the next manifest."""
        self._retracted.add((event.tenant, event.request_id))
        if self._tenants.get(event.request_id) == event.tenant:
            self._mask(event.request_id, Outcome.CANCELLED)

    def leave_out(self, request_id: str) -> None:
        """Note that a sample cannot be trained, if it is one of these."""
        self._mask(request_id, Outcome.INFRASTRUCTURE_ERROR)

    def _mask(self, request_id: str, outcome: Outcome) -> None:
        if (entry := self._entries.get(request_id)) is not None:
            self._entries[request_id] = msgspec.structs.replace(entry, outcome=outcome)

    def entries(self, version: int) -> list[SampleEntry]:
        """Return the live part of the batch that trains a version, the untrainable included."""
        chosen: list[SampleEntry] = []
        num_trained = 0
        for entry in self._entries.values():
            if entry.outcome.is_masked:
                chosen.append(entry)
            elif self._is_stale(entry, version):
                chosen.append(msgspec.structs.replace(entry, outcome=Outcome.STALE))
            elif num_trained < self._config.live.num_samples_max:
                advantage = self.baseline.advantage(entry.reward)
                chosen.append(msgspec.structs.replace(entry, advantage=advantage))
                num_trained += 1
        return chosen

    def __len__(self) -> int:
        """Return the number of samples that wait."""
        return len(self._entries)

    def commit(self, manifest: BatchManifest) -> None:
        """Take out what a stored manifest lists, and move the baseline by what it trains."""
        for entry in manifest.live:
            self._entries.pop(entry.rollout_id, None)
            self._tenants.pop(entry.rollout_id, None)
            self._settled.add(entry.rollout_id)
        trained = [entry.reward for entry in manifest.live if entry.outcome.is_trained]
        self.baseline = self.baseline.after(trained)

    def _is_stale(self, entry: SampleEntry, version: int) -> bool:
        oldest = min((span.policy_version for span in entry.version_spans), default=version)
        return version - oldest > self._config.staleness_max
