"""What a run waits for, as a section of the view model."""

import msgspec


class WaitEdge(msgspec.Struct, kw_only=True):
    """An edge of the wait-for graph."""

    actor: str
    target: str
    reason: str
    waited_s: float
    deadline_s: float


class StallView(msgspec.Struct, kw_only=True):
    """What the run waits for."""

    is_stalled: bool = False
    """Nothing has moved for longer than `waits.QUIET_S`."""
    quiet_s: float = 0.0
    """Time since something moved."""
    chain: list[WaitEdge] = []
    root: str = ""
    """Last actor or thing of the chain."""
    words: str = "nothing is waiting"
