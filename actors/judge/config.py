"""Settings of judges."""

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat, PositiveFloat, PositiveInt


class LengthPenaltyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights and form of the penalty; defaults keep it well below the value of a solved task."""

    scale: NonNegativeFloat = 0.02
    """Reward lost for each unit of C; 0 turns the penalty off."""
    penalty_max: NonNegativeFloat = 0.2
    """Bound of the whole penalty."""
    k: NonNegativeFloat = 0.5
    q: NonNegativeFloat = 1.0
    sampled_token: NonNegativeFloat = 0.002
    """Weight of one token that the policy drew; thinking, calls and answer alike."""
    observed_token: NonNegativeFloat = 0.0005
    """Weight of one token that a tool returned."""
    call: NonNegativeFloat = 0.1
    turn: NonNegativeFloat = 0.1


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which judge, what an outcome is worth, and how long grading may take."""

    judge: str = "hidden_tests"
    num_concurrent: PositiveInt = 4
    """Rollouts graded at once, each in a machine of its own."""
    reward_solved: float = 1.0
    reward_failed: float = 0.0
    reward_min: float = -0.25
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

    def __post_init__(self) -> None:
        """Refuse rewards that would pay for failing."""
        floor = self.reward_failed - self.length_penalty.penalty_max
        if not self.reward_min <= floor < self.reward_solved - self.length_penalty.penalty_max:
            raise ConfigError(
                "judge: expected reward_min <= reward_failed - length_penalty.penalty_max and "
                f"reward_failed < reward_solved, got {self.reward_min}, {floor}, "
                f"{self.reward_solved}"
            )
