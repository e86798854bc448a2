"""Pending groups: what the log shows of each group that no manifest has settled. Pure.

With `trainer.staleness_policy = "withhold"`, no step waits for a straggler and no group is dropped
for one: a group is trained once all of its rollouts have verdicts. Tokens that are too old by then
are context only; what the same rollouts sampled later is trained, against a baseline of all of
the rewards.

```
staleness_max 2, trained at version 6       version   2    3    4    5    6     reward
  first rollout, done at version 3                    ------                    counts, WITHHELD
  last rollout, done at version 6                          ------ +++++++++     counts, trained
                                                                  trained from version 4 on
```
No rollout ends after its group was trained: the group waits for all of them, the steps do not.
Source: prime-rl withholds whole rollouts (pull request 2960). Here the fresh part of a rollout is
kept, so rollouts of slow tasks, old at their beginning, are still trained.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.objective.advantages import trunk_credits
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import (
    EpisodeEnd,
    RolloutFinished,
    SandboxRecord,
    Trunk,
    TurnSampled,
    VersionSpan,
    tokens_by_version,
)
from penstock.messages.training import SampleEntry, TrunkCredit


def fate_of_age(
    spans: Sequence[VersionSpan], policy_version: int, config: TrainerConfig
) -> Outcome | None:
    """Return the outcome that excludes a complete group from a step for its age, or None.

    Args:
        spans: Tokens of all its rollouts that may be trained; not empty.
        policy_version: Version that the step trains.
        config: Settings of the step.

    """
    versions = [span.policy_version for span in spans]
    oldest_allowed = policy_version - config.staleness_max
    if config.staleness_policy == "withhold":
        return Outcome.WITHHELD if max(versions) < oldest_allowed else None
    return Outcome.STALE if min(versions) < oldest_allowed else None


def first_trained(sample: SampleEntry, policy_version: int, config: TrainerConfig) -> int | None:
    """Return the first version whose tokens are trained; None if all are withheld.

    Returns:
        0 if nothing is withheld.

    """
    if config.staleness_policy != "withhold" or not sample.version_spans:
        return 0
    oldest_allowed = policy_version - config.staleness_max
    versions = [span.policy_version for span in sample.version_spans]
    if min(versions) >= oldest_allowed:
        return 0
    return oldest_allowed if max(versions) >= oldest_allowed else None


def without_old_tokens(
    sample: SampleEntry, policy_version: int, config: TrainerConfig
) -> SampleEntry:
    """Return a sample's entry with tokens that are too old to be trained marked as withheld."""
    if not sample.outcome.is_trained:
        return sample
    first = first_trained(sample, policy_version, config)
    if first is None:
        return msgspec.structs.replace(sample, outcome=Outcome.WITHHELD, advantage=0.0, trunk=None)
    return msgspec.structs.replace(sample, trained_from=first)


_ENDS_MASKED = {
    EpisodeEnd.INFRASTRUCTURE_ERROR: Outcome.INFRASTRUCTURE_ERROR,
    EpisodeEnd.CANCELLED: Outcome.CANCELLED,
}
"""Outcomes of ends that need no judge."""


@dataclass(kw_only=True)
class Attempt:
    """One rollout of a group, as far as the log shows."""

    rollout_id: str
    member: int = -1
    """Position in the group; -1 until the rollout is finished."""
    turns: dict[int, list[VersionSpan]] = field(default_factory=dict)
    """Version spans by turn; for a branch, only the turns after its trunk. Filled by `add_turn`."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Spans of all sampled tokens, one per version, oldest first."""
    trunk: Trunk | None = None
    """Rollout that it branched off from, and where."""
    outcome: Outcome | None = None
    reward: float = 0.0
    merit: float = 0.0
    """Reward without its length penalty."""

    def add_turn(self, index: int, spans: list[VersionSpan]) -> None:
        """Record the versions that sampled a turn; repeating a turn changes nothing."""
        if self.turns.get(index) != spans:
            self.turns[index] = spans
            self.spans = merge_spans(span for each in self.turns.values() for span in each)

    def num_tokens(self, num_turns: int) -> int:
        """Return the number of tokens sampled in the first `num_turns` turns."""
        spans = [span for index, each in self.turns.items() if index < num_turns for span in each]
        return sum(span.num_tokens for span in spans)

    @property
    def is_masked(self) -> bool:
        """Whether the rollout is accounted for but was not the policy's doing."""
        return self.outcome is not None and self.outcome.is_masked

    @property
    def is_judged(self) -> bool:
        """Whether the rollout is finished and has an outcome."""
        return self.member >= 0 and self.outcome is not None


@dataclass(kw_only=True)
class PendingGroup:
    """Rollouts of one task."""

    group_id: str
    group_index: int = -1
    group_size: int = 0
    """Expected rollouts; 0 until one is finished."""
    task_id: str = ""
    machine: tuple[str, str, str] | None = None
    """Backend, kernel and image of the first rollout's machine, which all members must share."""
    attempts: dict[str, Attempt] = field(default_factory=dict)

    def add_turn(self, event: TurnSampled) -> None:
        """Record the versions that sampled a turn."""
        attempt = self._attempt(event.rollout_id)
        attempt.add_turn(event.turn_index, event.turn.summary.version_spans)

    def add_rollout(self, event: RolloutFinished, fault: str) -> None:
        """Record a finished rollout; one with a fault cannot be trained and counts as masked.

        A rollout in a different machine than the others counts as masked, too: rewards earned in
        unlike
        machines cannot be compared.

        """
        self.group_index, self.group_size = event.group_index, event.group_size
        self.task_id = event.task_id
        attempt = self._attempt(event.rollout_id)
        attempt.member = event.member
        attempt.trunk = event.trunk
        for index, turn in enumerate(event.own_turns):
            attempt.add_turn(event.num_trunk_turns + index, turn.version_spans)
        is_faulty = bool(fault) or not self._is_alike(event.sandbox)
        masked = Outcome.INFRASTRUCTURE_ERROR if is_faulty else _ENDS_MASKED.get(event.end)
        attempt.outcome = masked or attempt.outcome

    def leave_out(self, rollout_id: str, outcome: Outcome) -> None:
        """Record that a rollout cannot be trained, if it belongs to this group."""
        if rollout_id in self.attempts:
            self.attempts[rollout_id].outcome = outcome

    def _is_alike(self, sandbox: SandboxRecord | None) -> bool:
        if sandbox is None:
            return True
        machine = (sandbox.backend, sandbox.kernel_digest, sandbox.image_digest)
        self.machine = self.machine or machine
        return machine == self.machine

    def add_verdict(self, event: Verdict) -> None:
        """Record a verdict; the first one counts, and an outcome without a judge stands."""
        attempt = self._attempt(event.rollout_id)
        if attempt.outcome is None:
            attempt.outcome, attempt.reward = event.outcome, event.reward
            attempt.merit = event.merit

    @property
    def is_complete(self) -> bool:
        """Whether every member is finished and judged."""
        judged = sum(attempt.is_judged for attempt in self.attempts.values())
        return 0 < self.group_size == judged

    @property
    def members(self) -> list[Attempt]:
        """Attempts in member order."""
        return sorted(self.attempts.values(), key=lambda attempt: attempt.member)

    @property
    def unmasked(self) -> list[Attempt]:
        """Attempts that count in the baseline and are trained, in member order."""
        return [attempt for attempt in self.members if not attempt.is_masked]

    @property
    def trainable_spans(self) -> list[VersionSpan]:
        """Spans of the tokens that may be trained, rollout by rollout."""
        return [span for attempt in self.unmasked for span in attempt.spans]

    @property
    def num_solved(self) -> int:
        """Number of rollouts that solved the task."""
        return sum(attempt.outcome is Outcome.SOLVED for attempt in self.attempts.values())

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all rollouts have the same reward."""
        return len({attempt.reward for attempt in self.unmasked}) == 1

    @property
    def has_equal_merits(self) -> bool:
        """Whether all rollouts have the same merit: they differ by length at most."""
        return len({attempt.merit for attempt in self.unmasked}) == 1

    @property
    def min_version(self) -> int | None:
        """Oldest version that sampled a trainable token; None if there is none."""
        return min((span.policy_version for span in self.trainable_spans), default=None)

    def trunk_credits(self, advantages: Mapping[str, float]) -> dict[str, TrunkCredit]:
        """Return the credit of each trunk: what the tokens before a branching point earn.

        Args:
            advantages: Advantages of the unmasked rollouts, by id.

        """
        trunks = {each.rollout_id: each.trunk for each in self.unmasked if each.trunk}
        return trunk_credits(
            advantages,
            trunks,
            lambda trunk: self.attempts[trunk.rollout_id].num_tokens(trunk.num_turns),
        )

    def _attempt(self, rollout_id: str) -> Attempt:
        return self.attempts.setdefault(rollout_id, Attempt(rollout_id=rollout_id))


def merge_spans(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Return the tokens of each version summed up, oldest first."""
    return [
        VersionSpan(policy_version=version, num_tokens=num_tokens)
        for version, num_tokens in tokens_by_version(spans).items()
    ]
