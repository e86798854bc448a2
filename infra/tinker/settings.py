"""Settings of `penstock tinker`; addresses, keys and body limits are those of `[gateway]`."""

import msgspec

from penstock.messages.settings import PositiveFloat, PositiveInt


class TinkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one server."""

    model: str = ""
    """Name that clients may use for the base besides its path; by default, only the path."""
    rank_max: PositiveInt = 128
    """Highest rank of an adapter."""
    num_models_max: PositiveInt = 8
    """Maximum adapters in training that are in memory; others come back from the log."""
    num_samplers_max: PositiveInt = 4
    """Maximum samplers in memory, each with a copy of the base."""
    tenant_models_max: PositiveInt = 64
    """Maximum models of one tenant, whether in memory or not."""
    num_pending_max: PositiveInt = 4096
    """Maximum calls that wait for an answer, over all keys; further ones get 429."""
    pending_bytes_max: PositiveInt = 256 << 20
    """Maximum bytes of their bodies."""
    num_sampling_max: PositiveInt = 16
    """Maximum sequences that one sampler computes at once."""
    num_workers: PositiveInt = 2
    """Passes of one forward_backward that are computed at once; changes no bit."""
    pass_tokens: PositiveInt = 4096
    """Tokens of one pass; a longer sequence is a pass of its own."""
    keep_steps: PositiveInt = 8
    """Optimizer steps after which a model is kept, so that a restart repeats fewer calls."""
    poll_s: PositiveFloat = 20.0
    """Seconds that a request for an answer waits for it before the client has to ask again."""
