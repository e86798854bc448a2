"""Settings of the pacer."""

from typing import Annotated

import msgspec

from penstock.envs.harness import HARNESS_VERSIONS
from penstock.messages.errors import ConfigError
from penstock.messages.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    one_of_or_own,
)
from penstock.messages.task import TEMPERATURE_MIN, TOP_P_MIN


class TreeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rollouts that branch off one another in mid-episode; needs machines that can be forked."""

    trunk_turns: PositiveInt = 1
    """Turns that the rollouts of a tree share."""
    branches: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 2
    """Rollouts of a tree. A group has `group_size / branches` trees, and its baseline is over all
    of its rollouts: a single tree's trunk learns nothing."""


class PacerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is granted, and how far ahead of the trainer."""

    seed: NonNegativeInt = 0
    groups_per_batch: PositiveInt = 4
    group_size: PositiveInt = 8
    """Rollouts of one task."""
    staleness_max: NonNegativeInt = 2
    """Versions between the oldest token of a rollout and the step that trains it."""
    steps_max: NonNegativeInt = 100
    """Grants end when this many batches are covered."""
    synchronous: bool = False
    """Grant a batch only when the one before is trained, as if `staleness_max` were 0."""
    await_baseline: bool = True
    """Hold training grants until version 0 is evaluated."""
    category_weights: dict[str, NonNegativeFloat] = {}
    """Category -> weight of its share of the groups; empty: all alike. Others weigh 0."""
    revisit_share: UnitInterval = 0.0
    """Share of the groups that attempt a task again while there are others that none attempted."""
    solve_rate_half_life: PositiveFloat = 16.0
    """Steps after which what is known of a task counts half, as the policy has changed."""
    temperature: Annotated[float, msgspec.Meta(ge=TEMPERATURE_MIN)] = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=TOP_P_MIN, le=1)] = 1.0
    eval_temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    harness: Annotated[str, one_of_or_own(HARNESS_VERSIONS)] = "1"
    """Version of the agents' tools, or own ones, `module:name`: a table of `ToolSpec` by name
    (docs/extend.md)."""
    tree: TreeConfig | None = None
    """Let training rollouts share their first turns."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if 0.0 < self.eval_temperature < TEMPERATURE_MIN:
            raise ConfigError(
                f"pacer.eval_temperature: expected 0, or at least {TEMPERATURE_MIN:g}, "
                f"got {self.eval_temperature:g}"
            )
        if self.tree is not None and self.group_size % self.tree.branches:
            raise ConfigError(
                f"pacer.tree.branches: expected a divisor of group_size {self.group_size}, "
                f"got {self.tree.branches}"
            )

    @property
    def staleness_granted(self) -> int:
        """How many versions ahead grants may run."""
        return 0 if self.synchronous else self.staleness_max
