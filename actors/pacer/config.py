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
    """Rollouts that share their first turns and then branch; needs machines that can be forked."""

    trunk_turns: PositiveInt = 1
    """Turns that the rollouts of a tree share."""
    branches: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 2
    """Rollouts per tree. A group has `group_size / branches` trees and one baseline: with a single
    tree, the trunk gets no advantage."""


class PacerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups are granted, and how far ahead of the trainer."""

    seed: NonNegativeInt = 0
    groups_per_batch: PositiveInt = 4
    group_size: PositiveInt = 8
    """Rollouts per group, all of one task."""
    staleness_max: NonNegativeInt = 2
    """Maximum versions between the oldest token of a rollout and the step that trains it."""
    steps_max: NonNegativeInt = 100
    """Batches to grant groups for."""
    synchronous: bool = False
    """Grant a batch only after the previous one is trained, as with `staleness_max` 0."""
    await_baseline: bool = True
    """Hold training grants until version 0 is evaluated."""
    category_weights: dict[str, NonNegativeFloat] = {}
    """Weight of each category's share of the groups; unnamed ones get 0. Empty weighs all alike."""
    revisit_share: UnitInterval = 0.0
    """Share of the groups that repeat a task while fresh tasks are left."""
    solve_rate_half_life: PositiveFloat = 16.0
    """Steps after which a rollout counts half in its task's solve rate, as the policy changes."""
    temperature: Annotated[float, msgspec.Meta(ge=TEMPERATURE_MIN)] = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=TOP_P_MIN, le=1)] = 1.0
    eval_temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    harness: Annotated[str, one_of_or_own(HARNESS_VERSIONS)] = "1"
    """Version of the agents' tools, or `module:name` of a table of `ToolSpec` by name
    (docs/extend.md)."""
    tree: TreeConfig | None = None
    """Trees of training rollouts; by default rollouts share no turns."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if 0.0 < self.eval_temperature < TEMPERATURE_MIN:
            raise ConfigError(
                f"pacer.eval_temperature: expected 0, or at least {TEMPERATURE_MIN:g}, "
                f"got {self.eval_temperature:g}"
            )
        # A last tree with fewer branches would weigh its trunk differently.
        if self.tree is not None and self.group_size % self.tree.branches:
            raise ConfigError(
                f"pacer.tree.branches: expected a divisor of group_size {self.group_size}, "
                f"got {self.tree.branches}"
            )

    @property
    def staleness_granted(self) -> int:
        """Versions that grants may run ahead."""
        return 0 if self.synchronous else self.staleness_max
