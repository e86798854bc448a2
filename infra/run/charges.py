"""Attribution of process deaths to the items in progress that may have caused them.

```
 death ─▶ killed from outside (SIGKILL without out-of-memory, SIGTERM ...) ─▶ nobody
       ├▶ its actor said why (exit code) ─────────────────────────────────▶ nobody, or as it said
       └▶ crashed (SIGSEGV, abort, out of memory, an exit unannounced)
            ├─ another process crashed or was killed then, too ─▶ nobody: the host is at fault
            ├─ more in progress than was noted ───────────────▶ nobody: the rest may be the cause
            ├─ one item in progress ──────────────────────────▶ proven
            ├─ one item in common with an earlier crash whose others differ ─▶ proven
            └─ several ─▶ suspects: from now on a process works on one of them at a time
```
An item with two proven charges is quarantined. Suspects are never in progress together, so two
crashes have at most one suspect in common; an innocent item that shares a crash with a culprit is
charged at most once, because the two are separated afterwards. A death that is charged to nobody
counts against the restart budget of the run.
"""

import signal
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum

import msgspec

from penstock.actors.runtime.in_progress import UNNAMED, NotedItem
from penstock.messages.control import CHARGES_MAX, ItemCharged, ItemQuarantined
from penstock.messages.errors import PenstockError

NEIGHBOR_S = 2.0
"""Seconds before or after a death within which another death points to the host."""
DEATHS_KEPT = 64
CRASHES_PER_RESTART = 5
"""Multiple of the restart budget above which the process itself is considered broken, whatever
items it was working on."""
_OUTSIDE = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class ExitCode(IntEnum):
    """Exit code by which an actor process reports why it ended."""

    FAILED = 1
    """An error without a known culprit."""
    STUCK = 3
    """A fold cannot get past an event, so the run cannot continue."""
    CHARGED = 4
    """An error that was charged to an item."""
    START_AGAIN = 5
    """A requested restart, or a launcher that stopped and will start again."""


class DeathCause(StrEnum):
    """Cause of the end of a process."""

    FAILED = "failed"
    CHARGED = "charged"
    START_AGAIN = "start_again"
    STUCK = "stuck"
    KILLED = "killed"
    CRASHED = "crashed"


def cause_of(code: int, *, is_out_of_memory: bool) -> DeathCause:
    """Return the cause that an exit code indicates; a negative code is a signal."""
    if code < 0:
        number = -code
        # The kernel's out-of-memory killer sends SIGKILL as well: then the process is at fault.
        if number == signal.SIGKILL and not is_out_of_memory:
            return DeathCause.KILLED
        return DeathCause.KILLED if number in _OUTSIDE else DeathCause.CRASHED
    try:
        return DeathCause[ExitCode(code).name]
    except ValueError:
        return DeathCause.CRASHED


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """Unrequested end of one process."""

    process: str
    at: float
    """Time of the death in monotonic seconds."""
    cause: DeathCause
    words: str
    items: tuple[NotedItem, ...] = ()
    """Items in progress at the time of the death."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """Consequences of a death."""

    events: list[ItemCharged | ItemQuarantined] = []
    counts: bool = True
    """Whether the death counts against the restart budget."""


class Attribution:
    """Attribution of deaths to items; pure. Judge each death once, after noting its neighbors."""

    def __init__(self, *, crashes_max: int, period_s: float) -> None:
        self._crashes_max = crashes_max
        self._period_s = period_s
        self._noted: deque[Death] = deque(maxlen=DEATHS_KEPT)
        self._crashes: deque[Death] = deque(maxlen=DEATHS_KEPT)
        self._numbers: dict[str, int] = {}
        """Number of charges per item, proven or not."""
        self._proven: dict[str, int] = {}

    def resume(self, charged: Iterable[ItemCharged]) -> None:
        """Restore the charges that an earlier launcher published."""
        for event in charged:
            self._numbers[event.item] = max(self._numbers.get(event.item, 0), event.number)
            self._proven[event.item] = self._proven.get(event.item, 0) + event.is_proven

    def note(self, death: Death) -> None:
        """Record a death immediately; it may explain the death of another process."""
        self._noted.append(death)

    def judge(self, death: Death) -> Judgement:
        """Return the consequences of a noted death; call it `NEIGHBOR_S` after the death."""
        if death.cause in {DeathCause.CHARGED, DeathCause.START_AGAIN}:
            return Judgement(counts=False)
        is_known = death.items and all(noted.item != UNNAMED for noted in death.items)
        if death.cause is not DeathCause.CRASHED or not is_known or self._has_neighbor(death):
            return Judgement()
        earlier = [crash for crash in self._crashes if crash.at >= death.at - self._period_s]
        self._crashes.append(death)
        same = [crash for crash in earlier if crash.process == death.process]
        # So many crashes with so many items point to the process, not to the items.
        if len(same) >= self._crashes_max:
            return Judgement()
        if len(death.items) == 1:
            return self._charged(death.items, death.words, death.items[0])
        # The one item that two otherwise different crashes share is the culprit.
        for crash in earlier:
            common = set(death.items) & set(crash.items)
            if len(common) == 1:
                return self._charged(death.items, death.words, common.pop())
        return self._charged(death.items, death.words)

    def _has_neighbor(self, death: Death) -> bool:
        return any(
            other.process != death.process
            and other.cause in {DeathCause.CRASHED, DeathCause.KILLED}
            and abs(other.at - death.at) <= NEIGHBOR_S
            for other in self._noted
        )

    def _charged(
        self, items: Sequence[NotedItem], words: str, culprit: NotedItem | None = None
    ) -> Judgement:
        """Charge the culprit, if known, and mark items without an earlier charge as suspects."""
        events: list[ItemCharged | ItemQuarantined] = []
        for noted in items:
            item, task_id, is_proven = noted.item, noted.task_id, noted == culprit
            number = self._numbers.get(item, 0) + 1
            if number > 1 and not is_proven:
                continue
            self._numbers[item] = number
            proven = self._proven[item] = self._proven.get(item, 0) + is_proven
            events.append(
                ItemCharged(
                    item=item, number=number, cause=words, is_proven=is_proven, task_id=task_id
                )
            )
            if proven >= CHARGES_MAX:
                events.append(ItemQuarantined(item=item, cause=words, task_id=task_id))
        return Judgement(events=events, counts=False)


def describe_death(process: str, code: int, cause: DeathCause, log: object) -> str:
    """Return a one-line description of a death."""
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    why = " (from outside)" if cause is DeathCause.KILLED else ""
    return f"process {process} ended {how}{why}; see {log}"


class RestartBudgetError(PenstockError, RuntimeError):
    """A process died more often than the restart budget allows; the text names its log."""


class RunStuckError(PenstockError, RuntimeError):
    """A process cannot get past an event that it must not skip; the text names its log."""


class RestartBudget:
    """Budget of restarts: at most `intensity` failures within `period_s` seconds are restarted.

    The unit of failure is an operating-system process: actors that need each other (a generator
    and its receiver share one engine) share a process, and an actor that fails takes its process
    down. Source: Erlang/OTP, Supervision Principles.
    """

    def __init__(self, *, intensity: int, period_s: float) -> None:
        self._intensity = intensity
        self._period_s = period_s
        self._failures: deque[float] = deque()

    def allows_restart(self, now: float) -> bool:
        """Count one failure at `now` seconds; return whether its process is restarted."""
        self._failures.append(now)
        while self._failures[0] < now - self._period_s:
            self._failures.popleft()
        return len(self._failures) <= self._intensity
