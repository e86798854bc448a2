"""Which versions are evaluated, and when: the settings, and a pure state machine.

A version is due at the start (0), every so many steps, and at the end of the run. It is requested
once all serving replicas have applied it or a later one.
"""

from collections.abc import Sequence

import msgspec

from penstock.messages.settings import NonNegativeInt, PositiveFloat, PositiveInt


class EvaluatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the policy is evaluated on held-out tasks."""

    num_eval_tasks: PositiveInt = 64
    eval_every_steps: NonNegativeInt = 0
    """0: only version 0 and the final version."""
    replicas: tuple[str, ...] = ()
    """Replicas that serve evaluations: a version is evaluated when all of them have applied it."""
    judge: str = "hidden_tests"
    """Name of the judge whose verdicts count."""
    eval_deadline_s: PositiveFloat = 600.0
    """Verdicts that are missing this long after the request are counted as masked."""


class EvalSchedule:
    """Versions that are due, against the versions that the replicas serve."""

    def __init__(self, every_steps: int, replicas: Sequence[str]) -> None:
        """Start with nothing due.

        Args:
            every_steps: Period of evaluations; 0 for none but the first and the last.
            replicas: Names of the replicas that must serve a version; empty asks for none.

        """
        self._every_steps = every_steps
        self._applied: dict[str, int] = dict.fromkeys(replicas, -1)
        self._due: set[int] = set()

    def make_due(self, policy_version: int) -> None:
        """Make a version due."""
        self._due.add(policy_version)

    def stepped(self, policy_version: int) -> None:
        """Make a version due if the period ends with it."""
        if self._every_steps and policy_version % self._every_steps == 0:
            self._due.add(policy_version)

    def applied(self, replica: str, policy_version: int) -> None:
        """Take note of the version that a replica serves."""
        if replica in self._applied:
            self._applied[replica] = max(self._applied[replica], policy_version)

    def take_due(self) -> list[int]:
        """Return the due versions that are served, in order, each once."""
        served = min(self._applied.values(), default=max(self._due, default=-1))
        ready = sorted(version for version in self._due if version <= served)
        self._due -= set(ready)
        return ready
