"""Forms batches from events. A pure state machine: no clock, no torch, no I/O.

```
TurnSampled ─────▶ running ──RolloutFinished + Verdict of every member──▶ complete
                      │                                                      │
                      │  (its deadline holds back younger batches)           │
                      ▼                                                      ▼
 too old when complete ──▶ discarded: stale         all masked ──▶ discarded
      (or withheld, `groups.py`)                    equal merit ──▶ discarded: filtered
                                                    else ──▶ batch, by deadline
```
Rollouts have equal merit if their rewards differ by the length penalty at most. With
`length_only_groups`, groups that differ only by it join the next batch in addition to the groups
that fill it.

`propose` only looks; `commit` changes state and is fed from the log's manifests alone. With two
trainers, or one killed after publishing, only the stored manifest counts, and a group leaves the
batcher exactly once.

Deadlines: a group's deadline is the last policy version that may train it, its oldest token's
version plus `staleness_max`. The step that trains version v makes version v + 1. A batch may be
taken if everything it leaves behind can still be trained in time (Hall's condition over deadlines):

```
staleness_max 2, 2 groups per batch, about to train version 1        complete   running
  deadline 2   a b | c                                               a, b       c
  deadline 3   d                                                     d
  steps left for deadline 2: those at versions 1 and 2, 2 groups each
  take a, b -> left c: the step at version 2 has room              -> go, do not wait for c

about to train version 2, complete: d, e; running: c (deadline 2)
  take d, e -> left c, with deadline 2 and no step for it          -> wait for c
  c completes -> take c, d
```
Only groups whose first turn is on the log are known. A group whose first turn takes longer than
`staleness_max` steps is already too old when it appears; it is discarded as stale, never trained,
so the bound holds.

The pacer grants new groups when steps are taken. If so many groups are discarded that no full batch
can form, a smaller one is taken, and later steps may take the difference. With `epoch`, a batch
holds only live samples: a full epoch, or fewer once it is due.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from penstock.actors.trainer.batching.groups import PendingGroup, fate_of_age, without_old_tokens
from penstock.actors.trainer.batching.live import LiveSamples
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.objective.advantages import estimator
from penstock.actors.trainer.preferences.waiting import WaitingPreferences
from penstock.messages.feedback import ConsentWithdrawn, FeedbackRetracted, LiveSampleJoined
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished, TurnSampled
from penstock.messages.signals.preferences import PreferenceFate
from penstock.messages.task import CreditsChanged, Purpose
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry


class Patience:
    """Decides how long a step waits for stragglers; times come from a monotonic clock.

    Where late groups are dropped or withheld, a step need not wait at all; a short wait saves
    tokens of
    slow tasks. Bits depend on it only through the manifest, which is on the log.

    """

    unsaved = ("_since",)

    def __init__(self, config: TrainerConfig) -> None:
        """Read the maximum wait; with `pace` it is unbounded."""
        is_paced = config.staleness_policy == "pace"
        self._wait_s = math.inf if is_paced else config.straggler_wait_s
        self._since: float | None = None

    def is_left(self, now: float) -> bool:
        """Return whether the next step may still wait."""
        return self._wait_s > 0.0 and not self.is_over(now)

    def is_over(self, now: float) -> bool:
        """Return whether the next step has waited for as long as it may."""
        return self._since is not None and now >= self._since + self._wait_s

    def begin(self, now: float) -> None:
        """Start the wait, unless it has started."""
        if self._since is None:
            self._since = now

    def end(self) -> None:
        """End the wait: the step was taken."""
        self._since = None


class BatchCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A group as the choice of batches sees it."""

    group_id: str
    group_index: int
    deadline: int
    is_complete: bool


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Number of groups that steps may take: `groups_per_batch` per version, over the run."""

    version: int
    """Version that the next step trains."""
    groups_per_batch: int
    num_trained: int
    """Groups trained by all steps so far."""

    def until(self, deadline: int) -> int:
        """Return how many groups the steps at `version` to `deadline` may take together."""
        return (deadline + 1) * self.groups_per_batch - self.num_trained


def earliest(candidates: Sequence[BatchCandidate], room: Room) -> list[BatchCandidate]:
    """Return the complete groups that the next step takes, by deadline, then by index."""
    complete = [candidate for candidate in candidates if candidate.is_complete]
    complete.sort(key=lambda candidate: (candidate.deadline, candidate.group_index))
    return complete[: max(0, room.until(room.version))]


def must_wait_for(
    candidates: Sequence[BatchCandidate], taken: Sequence[BatchCandidate], room: Room
) -> list[str]:
    """Return the running groups that could no longer be trained in time after taking `taken`.

    Args:
        candidates: All groups with a deadline >= room.version, complete or running.
        taken: Choice of `earliest`.
        room: Room before the step.

    """
    for deadline in sorted({candidate.deadline for candidate in candidates}):
        due = [candidate for candidate in candidates if candidate.deadline <= deadline]
        num_taken = sum(candidate.deadline <= deadline for candidate in taken)
        later = room.until(deadline) - len(taken) if deadline > room.version else 0
        running = [candidate.group_id for candidate in due if not candidate.is_complete]
        is_full = num_taken == room.until(room.version)
        if len(due) - num_taken > later and running and not is_full:
            return running
    return []


class Batcher:
    """Groups and live samples that have not been trained, and the next batch of them."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._groups: dict[str, PendingGroup] = {}
        self._settled: set[str] = set()
        self._num_trained = 0
        self._num_discarded = 0
        self.last_step = 0
        """Step of the last committed manifest."""
        self._credits: CreditsChanged | None = None
        self._live = LiveSamples(config)
        self.preferences = WaitingPreferences(config)
        self.patience = Patience(config)
        self._settings = config.encoded()
        self.waits_for: str = "the first group"
        """Reason why the last `propose` returned None."""

    def add_turn(self, event: TurnSampled) -> None:
        """Record that a group runs, and under which versions."""
        if group := self._group(event.group_id, event.purpose):
            group.add_turn(event)

    def add_rollout(self, event: RolloutFinished, fault: str = "") -> None:
        """Add a finished rollout; a non-empty `fault` says why it cannot be trained."""
        if group := self._group(event.group_id, event.purpose):
            group.add_rollout(event, fault)

    def add_verdict(self, event: Verdict) -> None:
        """Add a rollout's reward, which may arrive before the rollout."""
        if group := self._group(event.group_id, event.purpose):
            group.add_verdict(event)

    def add_live(self, event: LiveSampleJoined) -> None:
        """Add a user's sample."""
        self._live.add(event)

    def leave_out(self, outcomes: Mapping[str, Outcome]) -> None:
        """Mark rollouts or live samples that cannot be trained, with their outcomes."""
        for sample_id, outcome in outcomes.items():
            self._live.leave_out(sample_id, outcome)
            for group in self._groups.values():
                group.leave_out(sample_id, outcome)

    def erase(self, tenant: str, user: str) -> None:
        """Leave out everything of a user that waits or still arrives, until `readmit`."""
        self._live.erase(tenant, user)
        self.preferences.erase(tenant, user)

    def readmit(self, tenant: str, user: str) -> None:
        """Accept a user's samples again; what was sealed before can no longer be read."""
        self._live.readmit(tenant, user)
        self.preferences.readmit(tenant, user)

    def withdraw(self, event: ConsentWithdrawn) -> None:
        """Leave out what a key no longer lets be trained."""
        self._live.withdraw(event)
        self.preferences.withdraw(event)

    def retract(self, event: FeedbackRetracted) -> None:
        """Withdraw untrained samples, corrections and judgments that rest on retracted feedback."""
        self._live.retract(event)
        self.preferences.retract(event)

    def add_credits(self, event: CreditsChanged) -> None:
        """Update how many groups were granted."""
        self._credits = event

    def propose(self, step: int, *, is_due: bool = False, now: float = 0.0) -> BatchManifest | None:
        """Return the batch of a step, or None if it has to wait (`waits_for` says for what).

        Args:
            step: Next step.
            is_due: Whether the epoch's time is over; its version then takes whatever is there.
            now: Seconds of the monotonic clock that `patience` uses.

        """
        if self._config.epoch is not None:
            return self._propose_live(step, 1 if is_due else self._config.epoch.num_samples)
        version = step - 1
        discarded = [
            entry
            for group in self._groups.values()
            if group.is_complete and (entry := self._discard(group, version))
        ]
        gone = {entry.group_id for entry in discarded}
        length_only = [
            group for group in self._groups.values() if self._is_length_only(group, gone)
        ]
        taken = self._take(version, gone | {group.group_id for group in length_only}, now)
        if taken is None:
            return None
        groups = [self._groups[candidate.group_id] for candidate in taken]
        return BatchManifest(
            step=step,
            policy_version=version,
            groups=[
                *(self._trained_entry(group, version) for group in groups),
                *(
                    msgspec.structs.replace(
                        self._trained_entry(group, version), is_length_only=True
                    )
                    for group in length_only
                ),
            ],
            discarded=discarded,
            live=self._live.entries(),
            preferences=self.preferences.entries(),
            settings=self._settings,
        )

    def _propose_live(self, step: int, num_samples: int) -> BatchManifest | None:
        """Return a batch of live samples alone once `num_samples` can be trained."""
        entries = self._live.entries()
        preferences = self.preferences.entries()
        num_missing = num_samples - sum(entry.outcome.is_trained for entry in entries)
        num_missing -= sum(entry.fate is PreferenceFate.TRAINED for entry in preferences)
        if num_missing > 0:
            self.waits_for = f"{num_missing} more samples of users"
            return None
        return BatchManifest(
            step=step,
            policy_version=step - 1,
            groups=[],
            live=entries,
            preferences=preferences,
            settings=self._settings,
        )

    def commit(self, manifest: BatchManifest) -> None:
        """Account for the groups and live samples of a stored manifest, in step order."""
        assert manifest.step == self.last_step + 1, f"{manifest.step} after {self.last_step}"
        self.last_step = manifest.step
        self.patience.end()
        for entry in (*manifest.groups, *manifest.discarded):
            self._groups.pop(entry.group_id, None)
            self._settled.add(entry.group_id)
        self._num_trained += manifest.num_placed
        self._num_discarded += manifest.num_made_up_for
        self._live.commit(manifest)
        self.preferences.commit(manifest)

    @property
    def num_live(self) -> int:
        """Live samples, corrections and judgments that no manifest has taken."""
        return len(self._live) + len(self.preferences)

    @property
    def num_groups(self) -> int:
        """Pending groups, running and complete."""
        return len(self._groups)

    def _group(self, group_id: str, purpose: Purpose) -> PendingGroup | None:
        if purpose is not Purpose.TRAIN or group_id in self._settled:
            return None
        return self._groups.setdefault(group_id, PendingGroup(group_id=group_id))

    def _take(self, version: int, gone: set[str], now: float) -> list[BatchCandidate] | None:
        room = Room(
            version=version,
            groups_per_batch=self._config.groups_per_batch,
            num_trained=self._num_trained,
        )
        candidates = self._candidates(version, gone)
        taken = earliest(candidates, room)
        # Fewer than a full batch may be taken only when no further group can arrive before the next
        # step; otherwise the pacer and the trainer would wait for each other.
        if len(taken) < self._config.groups_per_batch and not self._is_all_there(version):
            self.waits_for = f"{self._config.groups_per_batch - len(taken)} more groups"
            return None
        if self.patience.is_left(now):
            late = must_wait_for(candidates, taken, room)
            if late:
                self.patience.begin(now)
                self.waits_for = f"group {late[0]}, due in step {version + 1} or soon"
                return None
        return taken

    def _candidates(self, version: int, gone: set[str]) -> list[BatchCandidate]:
        found = []
        for group in self._groups.values():
            oldest = group.min_version
            if oldest is None or group.group_id in gone:
                continue
            deadline = oldest + self._config.staleness_max
            # A complete group past its deadline stays a candidate, so that `_discard` records it.
            if deadline >= version or group.is_complete:
                found.append(
                    BatchCandidate(
                        group_id=group.group_id,
                        group_index=group.group_index,
                        deadline=deadline,
                        is_complete=group.is_complete,
                    )
                )
        return found

    def _is_all_there(self, version: int) -> bool:
        """Return whether every granted group is complete and no grant precedes the next step."""
        credits = self._credits
        if credits is None or credits.policy_version != version:
            return False
        seen = (credits.num_groups_trained, credits.num_groups_discarded)
        # The credits must describe the manifests read so far; older ones undercount.
        if seen != (self._num_trained, self._num_discarded):
            return False
        num_complete = sum(group.is_complete for group in self._groups.values())
        num_open = credits.num_groups_granted - self._num_trained - self._num_discarded
        return 0 < num_open <= num_complete

    def _discard(self, group: PendingGroup, version: int) -> GroupEntry | None:
        """Return the entry of a complete group that will not be trained, else None."""
        spans = group.trainable_spans
        if not spans:
            return _entry(group, Outcome.FILTERED)
        if fate := fate_of_age(spans, version, self._config):
            return _entry(group, fate)
        config = self._config
        if config.filter_zero_variance and group.has_equal_merits:
            is_kept = config.length_only_groups and not group.has_equal_rewards
            return None if is_kept else _entry(group, Outcome.FILTERED)
        return None

    def _is_length_only(self, group: PendingGroup, gone: set[str]) -> bool:
        """Return whether a group is trained for its lengths only, in addition to a full batch."""
        is_filtered = self._config.filter_zero_variance and group.group_id not in gone
        return is_filtered and group.is_complete and group.has_equal_merits

    def _trained_entry(self, group: PendingGroup, version: int) -> GroupEntry:
        unmasked = group.unmasked
        values = estimator(self._config.estimator)([attempt.reward for attempt in unmasked])
        advantages = {
            attempt.rollout_id: value for attempt, value in zip(unmasked, values, strict=True)
        }
        entry = _entry(group, None, advantages)
        credits = group.trunk_credits(advantages)
        credited = (
            msgspec.structs.replace(sample, trunk=credits.get(sample.rollout_id))
            for sample in entry.samples
        )
        samples = [without_old_tokens(sample, version, self._config) for sample in credited]
        return msgspec.structs.replace(entry, samples=samples)


def _entry(
    group: PendingGroup, fate: Outcome | None, advantages: dict[str, float] | None = None
) -> GroupEntry:
    """Return a group's entry; `fate` replaces the outcomes of trainable rollouts."""
    samples = []
    for attempt in group.members:
        assert attempt.outcome is not None, f"{attempt.rollout_id} has no outcome"
        samples.append(
            SampleEntry(
                rollout_id=attempt.rollout_id,
                outcome=attempt.outcome if attempt.is_masked or not fate else fate,
                reward=attempt.reward,
                advantage=(advantages or {}).get(attempt.rollout_id, 0.0),
                version_spans=attempt.spans,
            )
        )
    return GroupEntry(
        group_id=group.group_id,
        group_index=group.group_index,
        task_id=group.task_id,
        samples=samples,
        num_judged=len(group.unmasked),
        num_solved=group.num_solved,
    )
