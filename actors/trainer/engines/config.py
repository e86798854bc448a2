"""Settings of the processes that share the weights. Imports no torch."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.messages.settings import NonNegativeInt, PositiveFloat

NUM_RANKS_MAX = 4096


class RanksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processes that hold the weights together: roles `rank:0` to `rank:num_ranks - 1`."""

    num_ranks: Annotated[int, Meta(ge=1, le=NUM_RANKS_MAX)] = 2
    step_s_max: PositiveFloat = 1800.0
    """Maximum time of a step, a checkpoint or one operation among ranks; a rank that exceeds it is
    hung, and all ranks start again from the newest checkpoint."""
    start_s_max: PositiveFloat = 600.0
    """Maximum time until all ranks answer at the start of a run, and after a failure."""
    restarts_max: NonNegativeInt = 10
    """Starts of all ranks for one step, after which the trainer fails with the cause."""
