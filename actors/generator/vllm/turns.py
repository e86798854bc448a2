"""What engine and worker say of a turn to each other beside vLLM's own messages."""

import msgspec

from penstock.messages.task import Sampling

EXTRA = "penstock"
"""Key of `SamplingParams.extra_args`: an encoded `TurnSettings`."""


class TurnSettings(msgspec.Struct, frozen=True):
    """How a turn is drawn."""

    key: str
    """Unique in the engine's lifetime; vLLM gives requests names of its own."""
    sampling: Sampling
    num_resumed: int = 0


class TurnRecord(msgspec.Struct, frozen=True):
    """What the worker noted of a turn."""

    supports: bytes = b""
    """uint8 [N, row_bytes(V)], of the tokens since the record before; empty where all could be
    drawn."""
    forced: bytes = b""
    """bool [N], with `supports`."""
    routes: bytes = b""
    """[R, L, K] from position 0, in the policy's dtype of routes; of the whole turn, at its end."""
    versions: bytes = b""
    """int32 [R]: which weights computed a position."""
    fault: str = ""
    """Why no further token can be drawn."""
    is_refused: bool = False
    """Whether that is the request's own doing."""
