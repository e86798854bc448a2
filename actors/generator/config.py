"""Settings of a generator. Imports no torch."""

from typing import Annotated

import msgspec

from penstock.actors.policy.config import DEVICES
from penstock.messages.settings import PositiveFloat, PositiveInt, one_of


class GeneratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacity of one replica."""

    num_running_max: PositiveInt = 48
    """Maximum requests decoded together."""
    num_waiting_max: PositiveInt = 256
    """Maximum requests in the queue; further ones are refused as busy."""
    num_tokens_max: PositiveInt = 1024
    """Longest context, prompt and sampled tokens together."""
    num_threads: PositiveInt = 1
    """Threads of torch; trainer and generators share the machine's cores."""
    device: Annotated[str, one_of(DEVICES)] = "cpu"
    """Where the native engine computes; cuda is the first GPU that the process sees."""
    lag_s_max: PositiveFloat = 60.0
    """A replica whose weights are older than `trainer.staleness_max` allows for so long no longer
    serves training, which goes on without it until it has caught up."""
