"""Wires on the virtual clock: first come, first served, at a bandwidth."""

import asyncio
from collections.abc import Sequence

PIECE_BYTES = 1 << 30
NUM_PIECES_MAX = 8
"""A large transfer queues in pieces, so that those that share a wire progress together."""


class Wire:
    """Something that bytes pass one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        """May change while it is in use."""
        self._free_at_s = 0.0
        self.num_bytes = 0
        """Carried so far."""

    def enter(self, now_s: float, num_bytes: int) -> float:
        """Queue some bytes; return when the last one is through."""
        self.num_bytes += num_bytes
        self._free_at_s = max(now_s, self._free_at_s) + num_bytes / self.bytes_per_s
        return self._free_at_s


async def carry(wires: Sequence[Wire], num_bytes: int, *, latency_s: float = 0.0) -> None:
    """Take the time that some bytes need through all the wires, which they pass abreast."""
    if not wires and not latency_s:
        return
    now_s = asyncio.get_running_loop().time
    pieces = min(NUM_PIECES_MAX, max(1, num_bytes // PIECE_BYTES))
    for piece in range(pieces):
        size = num_bytes * (piece + 1) // pieces - num_bytes * piece // pieces
        through_s = max((wire.enter(now_s(), size) for wire in wires), default=0.0)
        last_s = latency_s if piece == pieces - 1 else 0.0
        await asyncio.sleep(max(0.0, through_s - now_s()) + last_s)
