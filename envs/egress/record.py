"""Bounded record of what programs tried to reach; similar attempts share an entry. Pure."""

from collections.abc import Iterable

import msgspec

from penstock.messages.rollout import EgressAttempt

LINES_MAX = 128
"""Maximum entries for allowed attempts, and as many again for refused ones.

Separate bounds, so that a program cannot hide one kind by flooding the record with the other.
"""
TEXT_CHARACTERS_MAX = 160
METHOD_CHARACTERS_MAX = 32
Key = tuple[str, str, bool, str]
UNRECORDED = "not on record: more attempts than it has room for"
"""Reason of the entry that counts all attempts for which the record had no room."""


class EgressRecord:
    """Attempts grouped by method, target and outcome.

    Args:
        lines: Initial entries.
        lines_max: Maximum entries of each kind; see `LINES_MAX`.

    """

    def __init__(self, lines: Iterable[EgressAttempt] = (), lines_max: int = LINES_MAX) -> None:
        self._lines_max = lines_max
        self._lines: dict[Key, EgressAttempt] = {}
        self._num_lines = {True: 0, False: 0}
        self._unrecorded: EgressAttempt | None = None
        for line in lines:
            self.add(line)

    @property
    def lines(self) -> list[EgressAttempt]:
        """Entries in the order of their first attempt, preceded by one for what found no room."""
        first = [] if self._unrecorded is None else [self._unrecorded]
        return [*first, *self._lines.values()]

    def add(self, line: EgressAttempt) -> None:
        """Add the attempts of an entry."""
        # Methods and reasons contain text of the guest's programs: bound their length as well.
        line = msgspec.structs.replace(
            line,
            method=line.method[:METHOD_CHARACTERS_MAX],
            reason=line.reason[:TEXT_CHARACTERS_MAX],
        )
        key = (line.method, line.target, line.is_allowed, line.reason)
        if line.reason == UNRECORDED or not self._has_room(key, line):
            blank = msgspec.structs.replace(
                line, method="", target="", is_allowed=False, reason=UNRECORDED
            )
            self._unrecorded = _sum(self._unrecorded, blank)
            return
        if key not in self._lines:
            self._num_lines[line.is_allowed] += 1
        self._lines[key] = _sum(self._lines.get(key), line)

    def _has_room(self, key: Key, line: EgressAttempt) -> bool:
        return key in self._lines or self._num_lines[line.is_allowed] < self._lines_max


def _sum(total: EgressAttempt | None, line: EgressAttempt) -> EgressAttempt:
    if total is None:
        return line
    return msgspec.structs.replace(
        total,
        num_bytes_sent=total.num_bytes_sent + line.num_bytes_sent,
        num_bytes_received=total.num_bytes_received + line.num_bytes_received,
        num_attempts=total.num_attempts + line.num_attempts,
    )
