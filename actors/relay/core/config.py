"""Settings of weight publication: the table `[relay]` of a run's configuration."""

from typing import Annotated

import msgspec

NUM_PUBLISHER_RANKS_MAX = 64
"""Maximum number of publishing processes on the trainer's machine."""


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the upload of versions."""

    num_publisher_ranks: Annotated[int, msgspec.Meta(ge=1, le=NUM_PUBLISHER_RANKS_MAX)] = 1
    """Number of publishing processes; 1: the trainer uploads itself; more: each version is cut into
    that many equal parts, and a separate process uploads each part."""


def publisher_ranks(num_publisher_ranks: object) -> range:
    """Return the ranks that need their own process; empty if the trainer uploads itself."""
    # Called on raw configuration, before it is validated: a bad value is reported there, not here.
    if not isinstance(num_publisher_ranks, int):
        return range(0)
    return range(num_publisher_ranks if 1 < num_publisher_ranks <= NUM_PUBLISHER_RANKS_MAX else 0)
