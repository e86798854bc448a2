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
"""Machines that the same files may kill before that is their own doing."""


class LengthPenaltyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights and form of the penalty; defaults keep it well below the value of a solved task."""

    scale: NonNegativeFloat = 0.02
    """Reward lost for each unit of C; 0 turns the penalty off."""
    penalty_max: NonNegativeFloat = 0.2
    """Bound of the whole penalty."""
    k: NonNegativeFloat = 0.5
    q: NonNegativeFloat = 1.0
    thinking_token: NonNegativeFloat = 0.002
    """Weight of one token drawn that is neither of a call nor of the final message."""
    call_token: NonNegativeFloat = 0.002
    """Weight of one token drawn of a call."""
    final_token: NonNegativeFloat = 0.002
    """Weight of one token drawn of the final message."""
    output_token: NonNegativeFloat = 0.0005
    """Weight of one token that a tool returned."""
    call: NonNegativeFloat = 0.1
    turn: NonNegativeFloat = 0.1


class AuxiliaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What manners are worth at most; each is scored from 0 to 1 without a model."""

    style: NonNegativeFloat = 0.0
    """Few lints in the lines that the episode wrote."""
    communication: NonNegativeFloat = 0.0
    """A final message that names what was changed."""
    todos: NonNegativeFloat = 0.0
    """No to-do left behind: in the lines that it wrote, or open in its own plan."""

    @property
    def weights(self) -> dict[str, float]:
        """Those that count, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value > 0.0}


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which judges, what an outcome is worth, and how long grading may take."""

    judge: str = "hidden_tests"
    """The verifiable one, which alone decides the outcome: by its name, or own code, `module:name`,
    a class that is made with these settings (docs/extend.md)."""
    judges: list[RubricConfig] = []
    """Others, whose scores are added to the reward of what was graded."""
    auxiliary: AuxiliaryConfig = AuxiliaryConfig()
    scores_failed: bool = False
    """Whether these, and `auxiliary`, count where the tests fail, too: always below any solved
    rollout."""
    calibration_min: UnitInterval = 0.0
    """Agreement with people that a rubric judge needs, by the lower end of its 95% interval, for
    each criterion; 0: none."""
    num_concurrent: PositiveInt = 4
    """Rollouts graded at once, each in a machine of its own."""
    reward_solved: Finite = 1.0
    reward_failed: Finite = 0.0
    partial_credit: UnitInterval = 0.5
    """Reward of a failed rollout whose verifier gave nearly a whole reward, above
    `reward_failed`; of others in proportion."""
    reward_min: Finite = -0.25
    """Reward of the policy's own faults (a broken turn, a timeout), whatever the tests find."""
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    num_attempts_max: PositiveInt = 3
    """Machines tried before a rollout is masked as an infrastructure error."""
    places_machines: bool = False
    """Ask the scheduler for a host, one that has the task's image first; by default as
    `rollout_worker.places_groups`."""
    acquire_wait_s: PositiveFloat = 120.0
    retry_delay_s: PositiveFloat = 0.5
    lease_s: PositiveFloat = 60.0
    output_bytes_max: PositiveInt = 65536

    @property
    def bonus_max(self) -> float:
        """What judges and auxiliary rewards can add together."""
        return sum(one.weight for one in self.judges) + sum(self.auxiliary.weights.values())

    @property
    def retry(self) -> RetryPolicy:
        """How often a machine is asked for."""
        return RetryPolicy(pause_s=self.retry_delay_s, num_attempts_max=self.num_attempts_max)

    def lease_spec(self, lease_id: str, task: Task, holder: str = "") -> LeaseSpec:
        """Return the lease of a machine with the task's own image and size."""
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
        """Refuse rewards that would pay for failing."""
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
                "auxiliary < reward_solved - length_penalty.penalty_max, so that nothing outweighs "
                f"the tests, got {failed_max:g} and {solved_min:g}"
            )
        names = [one.name for one in self.judges]
        if len(names) > JUDGES_MAX or len(set(names)) < len(names):
            text = f"expected at most {JUDGES_MAX} judges, each name once, got {', '.join(names)}"
            raise ConfigError(f"judge.judges: {text}")
