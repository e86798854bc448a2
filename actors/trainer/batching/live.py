"""Users' samples waiting for the next step: REINFORCE with a baseline per tenant. Pure."""

from collections import OrderedDict

import msgspec

from penstock.actors.trainer.batching.fair_draw import RecentUsers, User, capped, draw, user_of
from penstock.actors.trainer.batching.groups import merge_spans
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.objective.live_baseline import LiveBaseline
from penstock.messages.feedback import FeedbackRetracted, LiveSampleJoined
from penstock.messages.reward import Outcome
from penstock.messages.training import BatchManifest, SampleEntry

NUM_LEFT_OUT_MAX = 1000
"""Samples that one manifest lists as left out, so that it stays an event; others follow."""
NUM_USERS_MAX = 10_000
"""Users whose last turn is kept; one forgotten is served as a new one."""


class LiveSamples:
    """Joined samples by request, in the order they came, and the baseline."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._entries: dict[str, SampleEntry] = {}
        self._tenants: dict[str, str] = {}
        self._settled: set[str] = set()
        self._retracted: set[tuple[str, str]] = set()
        """Tenant and request: nobody withdraws another tenant's sample."""
        self._baseline = LiveBaseline()
        self._recent = RecentUsers()
        self._served: OrderedDict[User, int] = OrderedDict()
        """User -> number of this user's last trained sample, the longest ago first."""
        self._num_trained = 0

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
            tenant=event.tenant,
            user=event.user,
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
        left_out: list[SampleEntry] = []
        waiting: dict[User, list[SampleEntry]] = {}
        for entry in self._entries.values():
            if entry.outcome.is_masked:
                left_out.append(entry)
            elif self._is_stale(entry, version):
                left_out.append(msgspec.structs.replace(entry, outcome=Outcome.STALE))
            else:
                waiting.setdefault(user_of(entry), []).append(entry)
        for samples in waiting.values():
            above = samples[: -self._config.live.num_waiting_max]
            left_out += [msgspec.structs.replace(each, outcome=Outcome.CAPPED) for each in above]
            del samples[: len(above)]
        eligible = [sample for samples in waiting.values() for sample in samples]
        live = self._config.live
        shares = self._recent.shares(eligible, live)
        drawn = draw(eligible, shares, self._served, live.num_samples_max)
        credited = self._baseline.credit(drawn, live)
        trained = capped(credited, self._recent.shares(drawn, live))
        return [*trained, *left_out[:NUM_LEFT_OUT_MAX]]

    def __len__(self) -> int:
        """Return the number of samples that wait."""
        return len(self._entries)

    def commit(self, manifest: BatchManifest) -> None:
        """Take out what a stored manifest lists, and move the baseline by what it trains."""
        for entry in manifest.live:
            self._entries.pop(entry.rollout_id, None)
            self._tenants.pop(entry.rollout_id, None)
            self._settled.add(entry.rollout_id)
        trained = [entry for entry in manifest.live if entry.outcome.is_trained]
        self._baseline.add(trained, self._config.of_step(manifest.settings).live)
        self._recent.add(trained)
        for entry in trained:
            self._num_trained += 1
            self._served[user_of(entry)] = self._num_trained
            self._served.move_to_end(user_of(entry))
        while len(self._served) > NUM_USERS_MAX:
            self._served.popitem(last=False)

    def _is_stale(self, entry: SampleEntry, version: int) -> bool:
        oldest = min((span.policy_version for span in entry.version_spans), default=version)
        return version - oldest > self._config.staleness_max
