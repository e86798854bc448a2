"""Verdicts of judges."""

from enum import StrEnum
from typing import ClassVar

from penstock.messages.base import Event, Stream
from penstock.messages.rollout import SandboxRecord
from penstock.messages.task import Purpose


class Outcome(StrEnum):
    """The one accounted end of every sample."""

    SOLVED = "solved"
    FAILED = "failed"
    POLICY_ERROR = "policy_error"
    TIMEOUT = "timeout"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    JUDGE_ERROR = "judge_error"
    STALE = "stale"
    FILTERED = "filtered"
    CANCELLED = "cancelled"

    @property
    def is_trained(self) -> bool:
        """The policy's own doing, and neither too old nor without a gradient."""
        return self in {Outcome.SOLVED, Outcome.FAILED, Outcome.POLICY_ERROR, Outcome.TIMEOUT}

    @property
    def is_masked(self) -> bool:
        """Not the policy's fault: no reward, no part in the group's baseline."""
        return self in {Outcome.INFRASTRUCTURE_ERROR, Outcome.JUDGE_ERROR, Outcome.CANCELLED}


class Verdict(Event, frozen=True, kw_only=True):
    """Judge -> trainer, pacer, monitor."""

    stream: ClassVar[Stream] = Stream.REWARDS
    rollout_id: str
    group_id: str
    group_index: int
    purpose: Purpose
    judge: str
    judge_version: str
    outcome: Outcome
    reward: float
    """Meaningless where `outcome.is_masked`."""
    components: dict[str, float] = {}
    """e.g. tests, length_penalty; they sum to `reward`."""
    num_tests_passed: int = 0
    num_tests: int = 0
    policy_version: int = 0
    """Oldest version that drew a token of the rollout."""
    rung: str = ""
    sandbox: SandboxRecord | None = None
    duration_ms: float = 0.0
    detail: str = ""

    def key(self) -> str:
        """One a rollout and judge."""
        return f"{self.rollout_id}.{self.judge}"
