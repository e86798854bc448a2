"""Transfers on the virtual clock, through the same queues as the regions' shaped links."""

import asyncio
from collections.abc import Sequence

from tests.lab.regions.shaping import Bandwidth

PART_BYTES = 1 << 30
NUM_PARTS_MAX = 8
"""A large transfer queues in parts, so that those that share a link progress together."""


async def carry(links: Sequence[Bandwidth], num_bytes: int, *, latency_s: float = 0.0) -> None:
    """Take the time that some bytes need through all the queues, which they pass in parallel."""
    if not links and not latency_s:
        return
    now_s = asyncio.get_running_loop().time
    parts = min(NUM_PARTS_MAX, max(1, num_bytes // PART_BYTES))
    for part in range(parts):
        size = num_bytes * (part + 1) // parts - num_bytes * part // parts
        through_s = max((link.enter(now_s(), size) for link in links), default=0.0)
        last_s = latency_s if part == parts - 1 else 0.0
        await asyncio.sleep(max(0.0, through_s - now_s()) + last_s)
