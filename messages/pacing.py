"""The staleness budget and evaluation rounds."""

from typing import ClassVar

from penstock.messages.base import Event, Stream


class CreditsChanged(Event, frozen=True, kw_only=True):
    """Pacer -> monitor, and the pacer itself after a restart. The latest wins."""

    stream: ClassVar[Stream] = Stream.CREDITS
    policy_version: int
    num_groups_granted: int
    num_groups_trained: int
    num_groups_discarded: int
    num_groups_allowed: int
    """(staleness_max + policy_version + 1) x groups a batch + discarded."""
    staleness_max: int

    def key(self) -> str:
        """One state a run."""
        return "state"


class EvalRequested(Event, frozen=True, kw_only=True):
    """Evaluator -> pacer: attempt every held-out task once."""

    stream: ClassVar[Stream] = Stream.CONTROL
    eval_id: str
    policy_version: int
    num_tasks: int

    def key(self) -> str:
        """One an evaluation."""
        return self.eval_id


class EvalCompleted(Event, frozen=True, kw_only=True):
    """Evaluator -> trainer (stop rule), monitor."""

    stream: ClassVar[Stream] = Stream.CONTROL
    eval_id: str
    policy_version: int
    num_solved: int
    num_tasks: int
    """Counted tasks: masked outcomes are left out."""
    num_masked: int = 0
    pass_rate_by_category: dict[str, float] = {}

    def key(self) -> str:
        """One an evaluation."""
        return self.eval_id
