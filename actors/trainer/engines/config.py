"""Settings of the processes that share the weights. Imports no torch."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.actors.runtime.host_context import OFFLOAD_S_MAX
from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeInt, PositiveFloat, PositiveInt, one_of

NUM_RANKS_MAX = 4096
MODELS = ("own", "transformers")


class RanksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processes that hold the weights together: roles `rank:0` to `rank:num_ranks - 1`."""

    num_ranks: Annotated[int, Meta(ge=1, le=NUM_RANKS_MAX)] = 2
    step_s_max: Annotated[float, Meta(gt=0.0, le=OFFLOAD_S_MAX)] = OFFLOAD_S_MAX
    """Maximum time of a step, a checkpoint or one operation among ranks; a rank that exceeds it is
    hung, and all ranks start again from the newest checkpoint. At most what an actor's blocking
    work may take."""
    start_s_max: PositiveFloat = 600.0
    """Maximum time until all ranks answer at the start of a run, and after a failure."""
    restarts_max: NonNegativeInt = 10
    """Starts of all ranks for one step, after which the trainer fails with the cause."""
    model: Annotated[str, one_of(MODELS)] = "own"
    """own: the policy of this project; transformers: the model of that package, from the folder
    that `model.checkpoint` names (extra `ranks`)."""
    num_expert_ranks: PositiveInt = 1
    """Ranks that divide the experts of each layer among them, in a model of transformers; 1: tokens
    stay on their rank, and the number of ranks changes no bit."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.num_expert_ranks == 1:
            return
        field = "trainer.ranks.num_expert_ranks"
        if self.model != "transformers":
            text = 'expected 1 with trainer.ranks.model = "own"'
            raise ConfigError(f"{field}: {text}, got {self.num_expert_ranks}")
        if self.num_ranks % self.num_expert_ranks:
            text = f"expected a divisor of trainer.ranks.num_ranks {self.num_ranks}"
            raise ConfigError(f"{field}: {text}, got {self.num_expert_ranks}")
