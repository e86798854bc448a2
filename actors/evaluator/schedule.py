"""Which versions are evaluated, and when: the settings.

A version is due at the start (0), every so many steps, and at the end of the run.
"""

import msgspec

from penstock.messages.settings import NonNegativeInt, PositiveFloat, PositiveInt


class EvaluatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the policy is evaluated on held-out tasks."""

    num_eval_tasks: PositiveInt = 64
    eval_every_steps: NonNegativeInt = 0
    """0: only version 0 and the final version."""
    judge: str = "hidden_tests"
    """Name of the judge whose verdicts count."""
    eval_deadline_s: PositiveFloat = 600.0
    """Longest evaluation, from the moment that its version is the next to be evaluated; verdicts
    that are missing then count as masked, also where no replica ever served the version."""

    def is_due(self, policy_version: int) -> bool:
        """Return whether the period ends with a version."""
        return self.eval_every_steps > 0 and policy_version % self.eval_every_steps == 0
