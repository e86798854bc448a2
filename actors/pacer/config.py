"""Settings of the pacer."""

import msgspec

from penstock.envs.harness import HARNESS_VERSIONS


class TreeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rollouts that branch off one another in mid-episode; needs machines that can be forked."""

    trunk_turns: int = 1
    """Turns that the rollouts of a tree share."""
    branches: int = 2
    """Rollouts of a tree. A group has `group_size / branches` trees, and its baseline is over all
    of its rollouts: a single tree's trunk learns nothing."""

    def __post_init__(self) -> None:
        """Refuse what is no tree."""
        for field, least in (("trunk_turns", 1), ("branches", 2)):
            if getattr(self, field) < least:
                value = getattr(self, field)
                raise ValueError(f"pacer.tree.{field}: expected >= {least}, got {value}")


class PacerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is granted, and how far ahead of the trainer."""

    seed: int = 0
    groups_per_batch: int = 4
    group_size: int = 8
    """Rollouts of one task."""
    staleness_max: int = 2
    """Versions between the oldest token of a rollout and the step that trains it."""
    steps_max: int = 100
    """Grants end when this many batches are covered."""
    synchronous: bool = False
    """Grant a batch only when the one before is trained, as if `staleness_max` were 0."""
    replicas: tuple[str, ...] = ()
    """Replicas that sample training rollouts. The budget counts the version that all of them have
    applied, since that is the oldest that a new rollout can meet. Empty: the trainer's own version,
    which bounds the staleness only if weights reach the replicas before the next grant."""
    await_baseline: bool = True
    """Hold training grants until version 0 is evaluated."""
    curriculum: str = "weighted"
    category_weights: dict[str, float] = {}
    """Category -> weight of its share of the groups; empty: all alike. Others weigh 0."""
    temperature: float = 1.0
    top_p: float = 1.0
    eval_temperature: float = 0.0
    """0 is greedy."""
    harness: str = "1"
    """Version of the agents' tools."""
    tree: TreeConfig | None = None
    """Let training rollouts share their first turns."""

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        for field in ("groups_per_batch", "group_size", "steps_max"):
            if getattr(self, field) < 1:
                raise ValueError(f"pacer.{field}: expected >= 1, got {getattr(self, field)}")
        if self.harness not in HARNESS_VERSIONS:
            choices = ", ".join(HARNESS_VERSIONS)
            raise ValueError(f"pacer.harness: expected one of {choices}, got {self.harness!r}")
        if self.tree is not None and self.group_size % self.tree.branches:
            raise ValueError(
                f"pacer.tree.branches: expected a divisor of group_size {self.group_size}, "
                f"got {self.tree.branches}"
            )
        if self.staleness_max < 0:
            raise ValueError(f"pacer.staleness_max: expected >= 0, got {self.staleness_max}")
        if any(weight < 0 for weight in self.category_weights.values()):
            raise ValueError(f"pacer.category_weights: expected >= 0, got {self.category_weights}")

    @property
    def staleness_granted(self) -> int:
        """How many versions ahead grants may run."""
        return 0 if self.synchronous else self.staleness_max
