"""How the trainer's weights are published: the table `[weights]` of a run's configuration."""

from collections.abc import Mapping
from typing import Any

import msgspec

NUM_PUBLISHER_RANKS_MAX = 64
"""Beside one trainer, on its machine."""


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who uploads a version."""

    num_publisher_ranks: int = 1
    """1: the trainer's own process. Above, a version is cut into as many equal parts, and as many
    processes upload theirs and prove each other's."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not 1 <= self.num_publisher_ranks <= NUM_PUBLISHER_RANKS_MAX:
            raise ValueError(
                f"weights.num_publisher_ranks: expected 1 to {NUM_PUBLISHER_RANKS_MAX},"
                f" got {self.num_publisher_ranks}"
            )


def publisher_ranks(table: Mapping[str, Any]) -> range:
    """Return the ranks that need processes of their own, by a table not checked yet."""
    num_ranks = table.get("num_publisher_ranks", 1)
    return range(num_ranks if num_ranks in range(2, NUM_PUBLISHER_RANKS_MAX + 1) else 0)
