"""What the trainer knows of each group that was granted and is not yet accounted for.

What is too old to be trained, and what of a late group is all the same. Pure.

With `trainer.staleness_policy = "withhold"` no step waits for a straggler, and no group is left out
for one: a group is trained when all of its rollouts have their verdicts, whenever that is. What is
too old by then is context alone; what the same rollouts sampled later is trained, against a
baseline of all rewards.

```
 staleness_max 2, trained at version 6       version   2    3    4    5    6     reward
   its first rollout, done at version 3                ------                    counts, WITHHELD
   its last one, done at version 6                          ------ +++++++++     counts, trained
                                                          trained from 4 on
```
No rollout ends after its group was trained: the group waits for all of them, the steps do not.
Source: whole rollouts are withheld by prime-rl (pull request 2960); here what is fresh of one is
kept, so that the rollouts of slow tasks, old at their beginning, are trained all the same.
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
    """Return as what a complete group is left out of a step for its age, or None.

    Args:
        spans: Tokens of all its rollouts that may be trained; some.
        policy_version: That the step trains.
        config: Of the step.

    """
    versions = [span.policy_version for span in spans]
    oldest_allowed = policy_version - config.staleness_max
    if config.staleness_policy == "withhold":
        return Outcome.WITHHELD if max(versions) < oldest_allowed else None
    return Outcome.STALE if min(versions) < oldest_allowed else None


def first_trained(sample: SampleEntry, policy_version: int, config: TrainerConfig) -> int | None:
    """Return from which version on a sample's tokens are trained; None: they are all withheld.

    Returns:
        0 where nothing is withheld.

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
    """Return a sample's entry without the tokens that are too old to be trained, if it is."""
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
"""Ends that need no judge."""


@dataclass(kw_only=True)
class Attempt:
    """One rollout of a group, as far as the log shows."""

    rollout_id: str
    member: int = -1
    """-1 until it is finished."""
    turns: dict[int, list[VersionSpan]] = field(default_factory=dict)
    """Its own: of a branch, those after its trunk; `add_turn` adds to them."""
    spans: list[VersionSpan] = field(default_factory=list)
    """All sampled tokens, one span per version, oldest first."""
    trunk: Trunk | None = None
    """Which attempt it branched off, and where."""
    outcome: Outcome | None = None
    reward: float = 0.0
    merit: float = 0.0
    """The reward without its length penalty."""

    def add_turn(self, index: int, spans: list[VersionSpan]) -> None:
        """Note which versions drew a turn; the same turn again changes nothing."""
        if self.turns.get(index) != spans:
            self.turns[index] = spans
            self.spans = merge_spans(span for each in self.turns.values() for span in each)

    def num_tokens(self, num_turns: int) -> int:
        """Count the tokens sampled in the first turns."""
        spans = [span for index, each in self.turns.items() if index < num_turns for span in each]
        return sum(span.num_tokens for span in spans)

    @property
    def is_masked(self) -> bool:
        """Whether it is accounted for but not the policy's doing."""
        return self.outcome is not None and self.outcome.is_masked

    @property
    def is_judged(self) -> bool:
        """Whether nothing more is to come."""
        return self.member >= 0 and self.outcome is not None


@dataclass(kw_only=True)
class PendingGroup:
    """The rollouts of one task."""

    group_id: str
    group_index: int = -1
    group_size: int = 0
    """0 until a rollout is finished."""
    task_id: str = ""
    machine: tuple[str, str, str] | None = None
    """Backend, kernel and image of the first rollout's machine: all of a group have the same."""
    attempts: dict[str, Attempt] = field(default_factory=dict)

    def add_turn(self, event: TurnSampled) -> None:
        """Note which versions drew a turn."""
        attempt = self._attempt(event.rollout_id)
        attempt.add_turn(event.turn_index, event.turn.summary.version_spans)

    def add_rollout(self, event: RolloutFinished, fault: str) -> None:
        """Note a finished rollout; one with a fault cannot be trained, and counts as masked.

        So does one whose machine is unlike the others': its reward compares with none of theirs.
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
        """Note that a rollout cannot be trained, if it is one of this group's."""
        if rollout_id in self.attempts:
            self.attempts[rollout_id].outcome = outcome

    def _is_alike(self, sandbox: SandboxRecord | None) -> bool:
        if sandbox is None:
            return True
        machine = (sandbox.backend, sandbox.kernel_digest, sandbox.image_digest)
        self.machine = self.machine or machine
        return machine == self.machine

    def add_verdict(self, event: Verdict) -> None:
        """Note a verdict; the first one counts, and an outcome without a judge stands."""
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
        """Attempts that count for the baseline and are trained, in member order."""
        return [attempt for attempt in self.members if not attempt.is_masked]

    @property
    def trainable_spans(self) -> list[VersionSpan]:
        """The tokens that may be trained, rollout by rollout."""
        return [span for attempt in self.unmasked for span in attempt.spans]

    @property
    def num_solved(self) -> int:
        """Count the rollouts that solved the task."""
        return sum(attempt.outcome is Outcome.SOLVED for attempt in self.attempts.values())

    @property
    def has_equal_rewards(self) -> bool:
        """Whether its rollouts have one reward."""
        return len({attempt.reward for attempt in self.unmasked}) == 1

    @property
    def has_equal_merits(self) -> bool:
        """Whether all did equally well: at most their lengths differ."""
        return len({attempt.merit for attempt in self.unmasked}) == 1

    @property
    def min_version(self) -> int | None:
        """The oldest version that drew a token which may be trained; None if there is none."""
        return min((span.policy_version for span in self.trainable_spans), default=None)

    def trunk_credits(self, advantages: Mapping[str, float]) -> dict[str, TrunkCredit]:
        """Return what the first tokens of each rollout earn that others branched off.

        Args:
            advantages: Of the unmasked rollouts, by id.

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
    """Add up the tokens of each version, oldest first."""
    return [
        VersionSpan(policy_version=version, num_tokens=num_tokens)
        for version, num_tokens in tokens_by_version(spans).items()
    ]
