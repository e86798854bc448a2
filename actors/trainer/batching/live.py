"""Users' samples waiting for the next step: REINFORCE with a baseline per tenant. Pure.

```
 LiveSampleJoined ─▶ waiting ──▶ a newer revision takes its place, until a manifest has one
                       │ feedback that it counts is retracted: held until the next revision
                       ▼
   manifest: trained │ trained again, by what has changed │ left out, with its outcome
```
"""

from collections import OrderedDict

import msgspec

from penstock.actors.trainer.batching.credit import LiveCredit, entry_of
from penstock.actors.trainer.batching.fair_draw import User, draw, user_of
from penstock.actors.trainer.batching.withdrawals import Withdrawals
from penstock.actors.trainer.config import TrainerConfig
from penstock.messages.feedback import ConsentWithdrawn, FeedbackRetracted, LiveSampleJoined
from penstock.messages.reward import Outcome
from penstock.messages.training import BatchManifest, SampleEntry

NUM_LEFT_OUT_MAX = 1000
"""Samples that one manifest lists as left out, so that it stays an event; others follow."""
NUM_USERS_MAX = 10_000
"""Users whose last turn is kept; one forgotten is served as a new one."""
NUM_RETRACTED_MAX = 100_000
"""Retractions that are remembered; the join's revision without them comes within seconds."""


class _Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A sample in its newest revision, its entry made once: every event asks for the next batch."""

    entry: SampleEntry
    feedback_ids: list[str]
    key_ids: list[str]
    recorded_at: float


class LiveSamples:
    """Joined samples in the order they came, each in its newest revision."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._waiting: dict[str, _Waiting] = {}
        self._masks: dict[str, Outcome] = {}
        """Sample -> why it cannot be trained."""
        self._retracted: OrderedDict[str, None] = OrderedDict()
        """Feedback that must not be trained any more."""
        self._withdrawn = Withdrawals()
        self._erasing: set[User] = set()
        """Users whose content keys are about to go."""
        self._credit = LiveCredit()
        self._served: OrderedDict[User, int] = OrderedDict()
        """User -> number of this user's last trained sample, the longest ago first."""
        self._num_trained = 0

    def add(self, event: LiveSampleJoined) -> None:
        """Put a sample in, or a newer revision in its place, unless a manifest has it."""
        name = event.sample_id
        if self._credit.is_settled(name, event.revision):
            return
        if name not in self._waiting or self._waiting[name].entry.revision < event.revision:
            self._waiting[name] = _Waiting(
                entry=entry_of(event),
                feedback_ids=event.feedback_ids,
                key_ids=event.key_ids,
                recorded_at=event.recorded_at,
            )
        if self._withdrawn.cover(event.tenant, event.key_ids, event.recorded_at):
            self.leave_out(name, Outcome.CANCELLED)
        if (event.tenant, event.user) in self._erasing:
            self._masks[name] = Outcome.ERASED

    def retract(self, event: FeedbackRetracted) -> None:
        """Hold samples that count a piece of feedback, until a revision does without it."""
        self._retracted[event.key()] = None
        while len(self._retracted) > NUM_RETRACTED_MAX:
            self._retracted.popitem(last=False)

    def withdraw(self, event: ConsentWithdrawn) -> None:
        """Leave out samples of a key that may not be trained any more, also those that come."""
        self._withdrawn.add(event)
        for name, one in self._waiting.items():
            if event.covers(one.entry.tenant, one.key_ids, one.recorded_at):
                self._masks[name] = Outcome.CANCELLED

    def erase(self, tenant: str, user: str) -> None:
        """Leave out a user's samples, also those that still come."""
        self._erasing.add((tenant, user))
        for name, waiting in self._waiting.items():
            if user_of(waiting.entry) == (tenant, user):
                self._masks[name] = Outcome.ERASED

    def readmit(self, tenant: str, user: str) -> None:
        """Take a user's samples again."""
        self._erasing.discard((tenant, user))

    def leave_out(self, sample_id: str, outcome: Outcome) -> None:
        """Note that a sample cannot be trained, if it is one of these."""
        if sample_id in self._waiting:
            self._masks[sample_id] = outcome

    def entries(self) -> list[SampleEntry]:
        """Return the live part of the next batch, the untrainable included."""
        left_out: list[SampleEntry] = []
        waiting: dict[User, list[SampleEntry]] = {}
        for name, sample in self._waiting.items():
            is_held = not self._retracted.keys().isdisjoint(sample.feedback_ids)
            if is_held and name not in self._masks:
                continue
            entry = sample.entry
            if fate := self._fate(entry):
                left_out.append(msgspec.structs.replace(entry, outcome=fate))
            else:
                waiting.setdefault(user_of(entry), []).append(entry)
        for samples in waiting.values():
            above = samples[: -self._config.live.num_waiting_max]
            left_out += [msgspec.structs.replace(each, outcome=Outcome.CAPPED) for each in above]
            del samples[: len(above)]
        eligible = [sample for samples in waiting.values() for sample in samples]
        live = self._config.live
        shares = self._credit.recent.shares(eligible, live)
        drawn = draw(eligible, shares, self._served, live.num_samples_max)
        return [*self._credit.credit(drawn, live), *left_out[:NUM_LEFT_OUT_MAX]]

    def __len__(self) -> int:
        """Return the number of samples that wait."""
        return len(self._waiting)

    def commit(self, manifest: BatchManifest) -> None:
        """Take out what a stored manifest lists, and move the baseline by what it trains."""
        for entry in manifest.live:
            name = entry.rollout_id
            if name in self._waiting and self._waiting[name].entry.revision <= entry.revision:
                del self._waiting[name]
                self._masks.pop(name, None)
        self._credit.commit(manifest.live, self._config.of_step(manifest.settings).live)
        for entry in manifest.live:
            if entry.outcome.is_trained:
                self._num_trained += 1
                self._served[user_of(entry)] = self._num_trained
                self._served.move_to_end(user_of(entry))
        while len(self._served) > NUM_USERS_MAX:
            self._served.popitem(last=False)

    def _fate(self, entry: SampleEntry) -> Outcome | None:
        """Return why a sample is not trained, or None."""
        if mask := self._masks.get(entry.rollout_id):
            return mask
        if len(entry.unrated) == entry.num_turns and not self._credit.was_trained(entry.rollout_id):
            return Outcome.CANCELLED
        return Outcome.FILTERED if self._credit.changes_nothing(entry) else None
