"""What programs tried to reach, as bounded lines: similar attempts share a line. Pure."""

from collections.abc import Iterable

import msgspec

from penstock.messages.rollout import EgressAttempt

LINES_MAX = 128
"""Lines of allowed attempts, and as many of refused ones: neither takes the other's room."""
TEXT_CHARACTERS_MAX = 160
METHOD_CHARACTERS_MAX = 32
Key = tuple[str, str, bool, str]
UNRECORDED = "not on record: more attempts than it has room for"


class EgressRecord:
    """Lines by method, target and outcome.

    Args:
        lines: Initial lines.
        lines_max: See `LINES_MAX`.

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
        """Lines by first attempt; before them what found no room, as one refused line."""
        first = [] if self._unrecorded is None else [self._unrecorded]
        return [*first, *self._lines.values()]

    def add(self, line: EgressAttempt) -> None:
        """Record attempts."""
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


def _sum(one: EgressAttempt | None, other: EgressAttempt) -> EgressAttempt:
    if one is None:
        return other
    return msgspec.structs.replace(
        one,
        num_bytes_sent=one.num_bytes_sent + other.num_bytes_sent,
        num_bytes_received=one.num_bytes_received + other.num_bytes_received,
        num_attempts=one.num_attempts + other.num_attempts,
    )
