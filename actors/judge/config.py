"""Settings of judges."""

import msgspec

from penstock.actors.judge.rubric.config import RubricConfig
from penstock.envs.sandbox_client.client import GroupSpec, LeaseSpec
from penstock.messages.errors import ConfigError
from penstock.messages.retries import RetryPolicy
from penstock.messages.settings import (
    Finite,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)
from penstock.messages.task import Task

JUDGES_MAX = 8
REPORTED = "reported"
"""Name of the judge that takes the reward of the program that played a rollout."""
KILLS_MAX = 2
"""Machines that the same files may kill before the files are to blame: one may be a coincidence."""


class LengthPenaltyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights and curve of the penalty (`reward.py`); by default far below a task's reward."""

    scale: NonNegativeFloat = 0.02
    """Reward lost per unit of C; 0 turns the penalty off."""
    penalty_max: NonNegativeFloat = 0.2
    """Upper bound of the penalty."""
    k: NonNegativeFloat = 0.5
    q: NonNegativeFloat = 1.0
    thinking_token: NonNegativeFloat = 0.002
    """Weight of a sampled token outside calls and the final message."""
    call_token: NonNegativeFloat = 0.002
    """Weight of a sampled token of a tool call."""
    final_token: NonNegativeFloat = 0.002
    """Weight of a sampled token of the final message."""
    output_token: NonNegativeFloat = 0.0005
    """Weight of a token that a tool returned."""
    call: NonNegativeFloat = 0.1
    turn: NonNegativeFloat = 0.1


class AuxiliaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of scores from 0 to 1 that count style without a model."""

    style: NonNegativeFloat = 0.0
    """Weight of few lints in the lines that the episode wrote."""
    communication: NonNegativeFloat = 0.0
    """Weight of a final message that names the changed files."""
    todos: NonNegativeFloat = 0.0
    """Weight of leaving no to-do behind, in written lines or in the episode's plan."""

    @property
    def weights(self) -> dict[str, float]:
        """Positive weights by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value > 0.0}


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Judges, rewards for outcomes, and grading limits."""

    judge: str = "hidden_tests"
    """Verifiable judge, the only one that decides the outcome: a name of `judges.JUDGES`, or
    `module:name` of a class that takes these settings (docs/extend.md)."""
    judges: list[RubricConfig] = []
    """Additional judges, whose scores are added to the reward."""
    auxiliary: AuxiliaryConfig = AuxiliaryConfig()
    scores_failed: bool = False
    """Whether `judges` and `auxiliary` also count for failed rollouts, which still earn less than
    any solved one."""
    calibration_min: UnitInterval = 0.0
    """Minimum agreement with people per criterion of a rubric judge, by the lower end of its 95%
    interval; 0 requires none."""
    num_concurrent: PositiveInt = 4
    """Rollouts graded at once, each in its own machine."""
    reward_solved: Finite = 1.0
    reward_failed: Finite = 0.0
    partial_credit: UnitInterval = 0.5
    """Reward above `reward_failed` per unit of a failed rollout's verifier score, in (0, 1)."""
    reward_min: Finite = -0.25
    """Reward of the policy's own faults, such as a broken turn or a timeout."""
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    num_attempts_max: PositiveInt = 3
    """Machines tried before a rollout is masked as an infrastructure error."""
    places_machines: bool = False
    """Ask the scheduler for a host, preferably one that has the task's image; by default as
    `rollout_worker.places_groups`."""
    acquire_wait_s: PositiveFloat = 120.0
    retry_delay_s: PositiveFloat = 0.5
    lease_s: PositiveFloat = 60.0
    output_bytes_max: PositiveInt = 65536

    @property
    def bonus_max(self) -> float:
        """Upper bound of what additional judges and auxiliary scores can add."""
        return sum(one.weight for one in self.judges) + sum(self.auxiliary.weights.values())

    @property
    def retry(self) -> RetryPolicy:
        """Retries of a lease of a machine."""
        return RetryPolicy(pause_s=self.retry_delay_s, num_attempts_max=self.num_attempts_max)

    def lease_spec(self, lease_id: str, task: Task, holder: str = "") -> LeaseSpec:
        """Return the lease of a machine with the task's image and size."""
        return LeaseSpec(
            holder=holder or lease_id,
            lease_s=self.lease_s,
            acquire_wait_s=self.acquire_wait_s,
            retry_delay_s=self.retry_delay_s,
            image_digest=task.image,
            machine=task.machine,
            group=GroupSpec(group_id=lease_id, num_machines=1) if self.places_machines else None,
            is_grading=True,
        )

    def __post_init__(self) -> None:
        """Refuse rewards by which a failed rollout could earn more than a solved one."""
        # The worst case of each outcome, whatever an episode's length and the other judges say.
        floor = self.reward_failed - self.length_penalty.penalty_max
        solved_min = self.reward_solved - self.length_penalty.penalty_max
        if not self.reward_min <= floor < solved_min:
            raise ConfigError(
                "judge: expected reward_min <= reward_failed - length_penalty.penalty_max and "
                f"reward_failed < reward_solved, got {self.reward_min}, {floor}, "
                f"{self.reward_solved}"
            )
        failed_max = self.reward_failed + self.partial_credit + self.bonus_max
        if not failed_max < solved_min:
            raise ConfigError(
                "judge: expected reward_failed + partial_credit + the weights of judges and of "
                "auxiliary < reward_solved - length_penalty.penalty_max, so that no failed rollout "
                f"earns more than a solved one, got {failed_max:g} and {solved_min:g}"
            )
        names = [one.name for one in self.judges]
        if len(names) > JUDGES_MAX or len(set(names)) < len(names):
            text = f"expected at most {JUDGES_MAX} judges, each name once, got {', '.join(names)}"
            raise ConfigError(f"judge.judges: {text}")
