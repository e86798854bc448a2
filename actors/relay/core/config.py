"""How the trainer's weights are published: the table `[relay]` of a run's configuration."""

from typing import Annotated

import msgspec

NUM_PUBLISHER_RANKS_MAX = 64
"""Maximum number of publishing processes on the trainer's machine."""


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a version is uploaded."""

    num_publisher_ranks: Annotated[int, msgspec.Meta(ge=1, le=NUM_PUBLISHER_RANKS_MAX)] = 1
    """1: the trainer's own process uploads. More: a version is cut into that many equal parts, each
    uploaded by a process of its own."""


def publisher_ranks(num_publisher_ranks: object) -> range:
    """Return the ranks that need processes of their own, from an unchecked setting."""
    if not isinstance(num_publisher_ranks, int):
        return range(0)
    return range(num_publisher_ranks if 1 < num_publisher_ranks <= NUM_PUBLISHER_RANKS_MAX else 0)
