"""Settings of the evaluator."""

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
    """Whose verdict counts."""
    eval_deadline_s: PositiveFloat = 600.0
    """Verdicts that are missing this long after the request are counted as masked."""
