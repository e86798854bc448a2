"""Settings of the gatekeeper."""

import msgspec


class GatekeeperConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the policy is evaluated on held-out tasks."""

    num_eval_tasks: int = 64
    eval_every_steps: int = 0
    """0: only version 0 and the final version."""
    replicas: tuple[str, ...] = ()
    """Replicas that serve evaluations: a version is evaluated when all of them have applied it."""
    judge: str = "hidden_tests"
    """Whose verdict counts."""
    eval_deadline_s: float = 600.0
    """Verdicts that are missing this long after the request are counted as masked."""

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        if self.num_eval_tasks < 1:
            raise ValueError(f"gatekeeper.num_eval_tasks: expected >= 1, got {self.num_eval_tasks}")
        if self.eval_every_steps < 0:
            raise ValueError(
                f"gatekeeper.eval_every_steps: expected >= 0, got {self.eval_every_steps}"
            )
        if self.eval_deadline_s <= 0:
            raise ValueError(
                f"gatekeeper.eval_deadline_s: expected > 0, got {self.eval_deadline_s}"
            )
