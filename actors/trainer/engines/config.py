"""Settings of the processes that share the weights. Imports no torch."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.actors.runtime.host_context import OFFLOAD_S_MAX
from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeInt, PlainText, PositiveFloat, PositiveInt, one_of

NUM_RANKS_MAX = 4096
MODELS = ("own", "transformers")
DTYPES = ("float32", "bfloat16")


class RanksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processes that hold the weights together: roles `rank:0` to `rank:num_ranks - 1`."""

    num_ranks: Annotated[int, Meta(ge=1, le=NUM_RANKS_MAX)] = 2
    step_s_max: Annotated[float, Meta(gt=0.0, le=OFFLOAD_S_MAX)] = OFFLOAD_S_MAX
    """Maximum time of a step, a checkpoint or one operation among ranks; a rank that exceeds it is
    hung, and all ranks start again from the newest checkpoint. At most what an actor's blocking
    work may take."""
    allow_plain_text: PlainText = []
    """Values of MASTER_ADDR off this machine: ranks authenticate each other, but what they send is
    not encrypted, so their network should be theirs alone."""
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
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    """What a model of transformers computes in; weights, moments and sums of gradients are float32
    in both."""
    compile: bool = False
    """Compile each layer of a model of transformers with torch.compile."""
    offload_activations: bool = False
    """Keep in the host's memory what a model of transformers saves for the backward pass."""
    offload_optimizer: bool = False
    """Keep weights, gradients and moments of a model of transformers in the host's memory; the
    device has those of the layer that it computes."""
    logits_bytes_max: PositiveInt = 256 << 20
    """Maximum float32 logits of a model of transformers in memory at once, per copy; the rows of
    more tokens are computed in chunks, in the backward pass again."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.model == "own" and self.methods:
            text = f"expected it with model = 'transformers' alone, got {self.methods}"
            raise ConfigError(f"trainer.ranks.{self.methods[0]}: {text}")
        if self.num_expert_ranks == 1:
            return
        field = "trainer.ranks.num_expert_ranks"
        if self.model != "transformers":
            text = 'expected 1 with trainer.ranks.model = "own"'
            raise ConfigError(f"{field}: {text}, got {self.num_expert_ranks}")
        if self.num_ranks % self.num_expert_ranks:
            text = f"expected a divisor of trainer.ranks.num_ranks {self.num_ranks}"
            raise ConfigError(f"{field}: {text}, got {self.num_expert_ranks}")

    @property
    def methods(self) -> list[str]:
        """What a model of transformers is computed with, beside the defaults."""
        flags = ("compile", "offload_activations", "offload_optimizer")
        found = [name for name in flags if getattr(self, name)]
        return found if self.dtype == "float32" else ["dtype", *found]
