"""Settings of trails and of who demonstrates them."""

from typing import Annotated

import msgspec

from penstock import ConfigError
from penstock.messages.settings import NonNegativeInt, UnitInterval


class TrailHabits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the demonstrating walker behaves."""

    drops: UnitInterval = 0.2
    """Probability that a summary leaves out one of the names known so far."""
    whole_share: UnitInterval = 0.5
    """Share of demonstrations in one context, however long; the others have the tasks' window."""


class TrailConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a trail is, and how much of it has to be carried."""

    num_stops: Annotated[int, msgspec.Meta(ge=2, le=200)] = 12
    """Visited one after the other: only the last file of a stop names the next one."""
    num_files: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    """Files of a stop, which can be read in one turn."""
    num_names: Annotated[int, msgspec.Meta(ge=1, le=12)] = 5
    """Names to bring back, each once, in files of their own; the other files have none."""
    file_bytes: NonNegativeInt = 24
    """Words of a file besides, in bytes, approximately."""
    habits: TrailHabits = TrailHabits()

    def __post_init__(self) -> None:
        """Check fields against each other."""
        num_files = self.num_stops * self.num_files
        if self.num_names > num_files:
            expected = f"expected at most one for each of {num_files} files"
            raise ConfigError(f"num_names: {expected}, got {self.num_names}")


class TrailTasks(TrailConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a source of trails."""

    prefix: str | None = None
    """Begins the tasks' ids and their seed; by default the source's name with a hyphen."""
