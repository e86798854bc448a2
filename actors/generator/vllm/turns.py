"""Messages about a turn between engine and worker, in addition to vLLM's own."""

import msgspec

from penstock.messages.task import Sampling

EXTRA = "penstock"
"""Key of `SamplingParams.extra_args`: an encoded `TurnSettings`."""


class TurnSettings(msgspec.Struct, frozen=True):
    """Sampling settings of a turn, sent with the request."""

    key: str
    """Key of the turn, unique in the engine's lifetime; vLLM renames requests."""
    sampling: Sampling
    num_resumed: int = 0


class TurnRecord(msgspec.Struct, frozen=True):
    """What the worker recorded about a turn since the previous record."""

    supports: bytes = b""
    """Tokens that could be drawn at each of the N new positions, uint8 [N, row_bytes(V)]; empty if
    all could be drawn."""
    forced: bytes = b""
    """Whether each new token was the only one allowed, bool [N]."""
    routes: bytes = b""
    """Experts of all R positions of the context, packed (`kernels.ops.routes_pack`); only in the
    last record."""
    versions: bytes = b""
    """Version of the weights that computed each of the R positions, int32 [R]."""
    fault: str = ""
    """Why no further token can be drawn; empty if there is no fault."""
    is_refused: bool = False
    """Whether the fault lies with the request itself."""
