"""View of what a run waits for: a section of the page."""

import msgspec


class WaitEdge(msgspec.Struct, kw_only=True):
    """An edge of the wait-for graph."""

    actor: str
    target: str
    reason: str
    waited_s: float
    deadline_s: float


class StallView(msgspec.Struct, kw_only=True):
    """The chain of waits that holds up the run, in data and in words."""

    is_stalled: bool = False
    """Whether the run has made no progress for `wait_graph.QUIET_S`."""
    quiet_s: float = 0.0
    """Seconds since the last event that shows progress."""
    chain: list[WaitEdge] = []
    """Edges of the longest chain of waits, in order."""
    root: str = ""
    """Actor or object at the end of the chain."""
    words: str = "nothing is waiting"
