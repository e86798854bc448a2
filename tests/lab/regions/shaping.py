"""When a packet that enters a link arrives: one queue of bounded length, then a constant delay."""

import random
from collections import deque

from tests.lab.regions.settings import LinkSection

QUEUE_S_MIN = 0.05
"""The queue holds a round trip's worth of packets, at least this much."""


class Bandwidth:
    """A first-come, first-served queue that drains at a bandwidth."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        """May change while it is in use."""
        self.num_bytes = 0
        """Bytes carried so far."""
        self._free_at_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Return the wait of what would enter now."""
        return max(0.0, self._free_at_s - now_s)

    def enter(self, now_s: float, num_bytes: int) -> float:
        """Queue some bytes; return when the last one is through."""
        self.num_bytes += num_bytes
        self._free_at_s = max(now_s, self._free_at_s) + num_bytes / self.bytes_per_s
        return self._free_at_s


class Shaper:
    """One direction of a link.

    ```
    enters ──▶ queue (drains at the bandwidth; full: dropped) ──▶ loss ──▶ delay ──▶ arrives
    ```
    The delay is the same for all, so packets arrive in the order in which they entered.
    """

    def __init__(self, link: LinkSection, seed: int) -> None:
        """Args: `seed` decides which packets are lost."""
        self._link = link
        self._dice = random.Random(seed)
        self._queue_s_max = max(QUEUE_S_MIN, link.rtt_ms / 1e3)
        self._queue = Bandwidth(link.bytes_per_s)

    def arrival_s(self, now_s: float, num_bytes: int) -> float | None:
        """Return when a packet that enters now arrives; None if it is lost.

        What the queue refuses takes no bandwidth; what is lost later does.
        """
        if self._queue.wait_s(now_s) > self._queue_s_max:
            return None
        through_s = self._queue.enter(now_s, num_bytes)
        if self._dice.random() < self._link.loss:
            return None
        return through_s + self._link.delay_s

    def arrival_in_stream_s(self, now_s: float, num_bytes: int) -> float:
        """Return when a chunk of a stream arrives; a lost one is sent again a round trip later."""
        while (arrival_s := self.arrival_s(now_s, num_bytes)) is None:
            now_s += self._queue_s_max
        return arrival_s


class InFlight:
    """Packets in flight, in order of arrival."""

    def __init__(self) -> None:
        self._packets: deque[tuple[float, bytes]] = deque()

    def add(self, arrival_s: float, packet: bytes) -> None:
        """Take a packet that arrives after all others."""
        self._packets.append((arrival_s, packet))

    def pop_arrived(self, now_s: float) -> bytes | None:
        """Return the next packet that has arrived, or None."""
        if not self._packets or self._packets[0][0] > now_s:
            return None
        return self._packets.popleft()[1]

    def wait_s(self, now_s: float) -> float | None:
        """Return the time to the next arrival; None if nothing is in flight."""
        return max(0.0, self._packets[0][0] - now_s) if self._packets else None
