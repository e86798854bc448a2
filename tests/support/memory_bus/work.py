"""A durable consumer in memory: who has what, until when, and how often it was delivered."""

import random
from collections import Counter

from tests.support.memory_bus.log import MemoryLog, Stored

from penstock.messages.streams import STREAMS, Retention


class MemoryDurable:
    """Shared work of one name."""

    def __init__(self, log: MemoryLog, prefixes: tuple[str, ...]) -> None:
        self.log = log
        self._prefixes = prefixes
        self._cursor = 0
        self._ready_at: dict[int, float] = {}
        self._out_until: dict[int, float] = {}
        self._num_delivered: Counter[int] = Counter()
        self._removes = STREAMS[log.stream].retention is Retention.WORK_QUEUE

    def take(
        self, now: float, ack_wait_s: float, rng: random.Random, *, reorder: float
    ) -> tuple[Stored, int] | None:
        """Return the next message and its delivery count, and start its redelivery timer."""
        self._catch_up(now)
        ready = [seq for seq, at in self._ready_at.items() if at <= now]
        if not ready:
            return None
        sequence = rng.choice(ready) if rng.random() < reorder else min(ready)
        del self._ready_at[sequence]
        message = self.log.get(sequence)
        if message is None:
            return self.take(now, ack_wait_s, rng, reorder=reorder)
        self._out_until[sequence] = now + ack_wait_s
        self._num_delivered[sequence] += 1
        return message, self._num_delivered[sequence]

    def next_time(self, now: float) -> float | None:
        """Return when something becomes ready by itself."""
        times = (*self._ready_at.values(), *self._out_until.values())
        return min((at for at in times if at > now), default=None)

    def ack(self, sequence: int) -> None:
        """Never deliver again."""
        self._out_until.pop(sequence, None)
        self._ready_at.pop(sequence, None)
        if self._removes:
            self.log.remove(sequence)

    def again(self, sequence: int, at: float) -> None:
        """Deliver again at `at`, where it is still out."""
        if self._out_until.pop(sequence, None) is not None:
            self._ready_at[sequence] = at

    def extend(self, sequence: int, until: float) -> None:
        """Reset the redelivery timer."""
        if sequence in self._out_until:
            self._out_until[sequence] = until

    def _catch_up(self, now: float) -> None:
        for sequence in range(self._cursor + 1, self.log.last_sequence + 1):
            message = self.log.get(sequence)
            if message is not None and message.subject.startswith(self._prefixes):
                self._ready_at[sequence] = 0.0
        self._cursor = self.log.last_sequence
        for sequence, until in list(self._out_until.items()):
            if until <= now:
                self.again(sequence, until)
