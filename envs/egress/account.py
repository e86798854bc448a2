"""Counts one machine's network use against its limits and keeps a bounded record. Pure."""

import msgspec

from penstock.envs.egress.record import LINES_MAX, EgressRecord
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import EgressAttempt

STILL_OPEN = "still open"


class EgressLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one machine's network use."""

    attempts_max: int = 256
    """Maximum attempts to reach allowed hosts; later ones are refused."""
    lines_max: int = LINES_MAX
    """Maximum entries of the record; see `EgressRecord`."""
    connections_max: int = 8
    """Maximum connections open at once."""
    bytes_max: int = 64 << 20
    """Maximum bytes over all connections, in both directions together."""
    connect_s_max: float = 10.0
    connection_s_max: float = 120.0


class EgressLimitError(PenstockError, RuntimeError):
    """A limit is reached; the error names it."""


class EgressEntry(msgspec.Struct):
    """Record entry of an open connection; see `EgressAttempt`."""

    method: str = ""
    target: str = ""
    is_allowed: bool = False
    reason: str = ""
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    is_answered: bool = False
    """Whether the program has received the beginning of an answer."""


class EgressAccount:
    """Network use of one machine."""

    def __init__(self, limits: EgressLimits) -> None:
        """Start with nothing used."""
        self.limits = limits
        self._record = EgressRecord(lines_max=limits.lines_max)
        self._open: dict[int, EgressEntry] = {}
        self._num_admitted = 0
        self._num_bytes = 0

    @property
    def attempts(self) -> list[EgressAttempt]:
        """Finished attempts, followed by open ones with their bytes so far."""
        record = EgressRecord(self._record.lines, self.limits.lines_max)
        for entry in self._open.values():
            if entry.method:
                line = msgspec.structs.replace(entry, reason=entry.reason or STILL_OPEN)
                record.add(_attempt(line))
        return record.lines

    def open(self) -> EgressEntry:
        """Start the record of a connection; `close` completes it."""
        entry = EgressEntry()
        # By identity: entries are mutable and two connections may have equal fields.
        self._open[id(entry)] = entry
        return entry

    def admit(self) -> None:
        """Count one more attempt to reach an allowed host.

        Raises:
            EgressLimitError: The machine has made too many attempts or has too many connections.

        """
        if self._num_admitted >= self.limits.attempts_max:
            raise EgressLimitError(f"more than {self.limits.attempts_max} attempts")
        if len(self._open) > self.limits.connections_max:
            raise EgressLimitError(f"more than {self.limits.connections_max} connections at once")
        self._num_admitted += 1

    def sent(self, entry: EgressEntry, num_bytes: int) -> None:
        """Count outgoing bytes; raise EgressLimitError beyond `bytes_max`."""
        entry.num_bytes_sent += num_bytes
        self._count(num_bytes)

    def received(self, entry: EgressEntry, num_bytes: int) -> None:
        """Count incoming bytes; raise EgressLimitError beyond `bytes_max`."""
        entry.num_bytes_received += num_bytes
        self._count(num_bytes)

    def close(self, entry: EgressEntry) -> None:
        """Record a connection; one that sent no request leaves no entry."""
        del self._open[id(entry)]
        if entry.method or entry.reason:
            self._record.add(_attempt(entry))

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self.limits.bytes_max:
            raise EgressLimitError(f"more than {self.limits.bytes_max} bytes")


def _attempt(entry: EgressEntry) -> EgressAttempt:
    return msgspec.convert(entry, EgressAttempt, from_attributes=True)
