"""What one machine may do outside, and what it has done: bounds, and a bounded record. Pure."""

import msgspec

from penstock.messages.errors import PenstockError
from penstock.messages.rollout import EgressAttempt


class EgressLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what one machine may do outside."""

    attempts_max: int = 256
    """Later ones are refused, and only counted."""
    connections_max: int = 8
    """At once."""
    bytes_max: int = 64 << 20
    """Of all connections, both ways."""
    connect_s_max: float = 10.0
    connection_s_max: float = 120.0


class EgressLimitError(PenstockError, RuntimeError):
    """A bound is reached; the text names it."""


class Entry(msgspec.Struct):
    """A connection's line of the record, while it is written; see `EgressAttempt`."""

    method: str = ""
    target: str = ""
    is_allowed: bool = False
    reason: str = ""
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    is_answered: bool = False
    """The program has had the beginning of an answer."""


class EgressAccount:
    """Of one machine."""

    def __init__(self, limits: EgressLimits) -> None:
        """Begin with nothing."""
        self.limits = limits
        self.attempts: list[EgressAttempt] = []
        self.num_unrecorded = 0
        """Attempts after the bound."""
        self._num_open = 0
        self._num_bytes = 0

    def open(self) -> Entry:
        """Begin a connection; `close` ends it."""
        self._num_open += 1
        return Entry()

    def admit(self) -> None:
        """Demand that there is room for one more attempt.

        Raises:
            EgressLimitError: There is none.

        """
        if len(self.attempts) >= self.limits.attempts_max:
            raise EgressLimitError(f"more than {self.limits.attempts_max} attempts")
        if self._num_open > self.limits.connections_max:
            raise EgressLimitError(f"more than {self.limits.connections_max} connections at once")

    def sent(self, entry: Entry, num_bytes: int) -> None:
        """Count what goes out; raises EgressLimitError."""
        entry.num_bytes_sent += num_bytes
        self._count(num_bytes)

    def received(self, entry: Entry, num_bytes: int) -> None:
        """Count what comes in; raises EgressLimitError."""
        entry.num_bytes_received += num_bytes
        self._count(num_bytes)

    def close(self, entry: Entry) -> None:
        """Put a connection on record; one that asked for nothing leaves no line."""
        self._num_open -= 1
        if not entry.method and not entry.reason:
            return
        if len(self.attempts) < self.limits.attempts_max:
            self.attempts.append(msgspec.convert(entry, EgressAttempt, from_attributes=True))
        else:
            self.num_unrecorded += 1

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self.limits.bytes_max:
            raise EgressLimitError(f"more than {self.limits.bytes_max} bytes")
