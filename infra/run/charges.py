"""Who killed a process: deaths are charged to what was in progress, where that can be the cause.

```
 death ─▶ killed from outside (SIGKILL without out-of-memory, SIGTERM ...) ─▶ nobody
       ├▶ its actor said why (exit code) ─────────────────────────────────▶ nobody, or as it said
       └▶ crashed (SIGSEGV, abort, out of memory, an exit unannounced)
            ├─ another process crashed or was killed then, too ─▶ nobody: it is the host
            ├─ more in progress than was noted ───────────────▶ nobody: it may be that
            ├─ one item in progress ──────────────────────────▶ proven
            ├─ one item in common with an earlier crash whose others differ ─▶ proven
            └─ several ─▶ suspects: of these, a process works on one at a time from now on
```
An item with two proven charges is quarantined. Two crashes have at most one suspect in common, as
suspects are never in progress together; one that shares a crash with another's culprit is charged
once at most, since from then on the two are apart. What nobody is charged with counts against the
run's restart budget.
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
"""Deaths of other processes within this time before or after one make it the host's."""
DEATHS_KEPT = 64
CRASHES_PER_RESTART = 5
"""A process that crashes this many times as often as the restart budget allows is broken itself,
whatever it was working on."""
_OUTSIDE = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class ExitCode(IntEnum):
    """How a process of actors says why it ended."""

    FAILED = 1
    """By an error that is nobody's in particular."""
    STUCK = 3
    """A fold cannot get past an event: the run cannot go on."""
    CHARGED = 4
    """By an error that was charged to an item."""
    START_AGAIN = 5
    """To be started again: as it was asked to, or because its launcher will come up again."""


class DeathCause(StrEnum):
    """What ended a process."""

    FAILED = "failed"
    CHARGED = "charged"
    START_AGAIN = "start_again"
    STUCK = "stuck"
    KILLED = "killed"
    CRASHED = "crashed"


def cause_of(code: int, *, is_out_of_memory: bool) -> DeathCause:
    """Return what an exit code (negative: a signal) says."""
    if code < 0:
        number = -code
        if number == signal.SIGKILL and not is_out_of_memory:
            return DeathCause.KILLED
        return DeathCause.KILLED if number in _OUTSIDE else DeathCause.CRASHED
    try:
        return DeathCause[ExitCode(code).name]
    except ValueError:
        return DeathCause.CRASHED


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one process that nobody asked for."""

    process: str
    at: float
    """Monotonic seconds."""
    cause: DeathCause
    words: str
    items: tuple[NotedItem, ...] = ()
    """In progress."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from a death."""

    events: list[ItemCharged | ItemQuarantined] = []
    counts: bool = True
    """Whether it counts against the restart budget."""


class Attribution:
    """Charges deaths. Pure: give it each death once, when its neighbors' deaths are noted too."""

    def __init__(self, *, crashes_max: int, period_s: float) -> None:
        self._crashes_max = crashes_max
        self._period_s = period_s
        self._noted: deque[Death] = deque(maxlen=DEATHS_KEPT)
        self._crashes: deque[Death] = deque(maxlen=DEATHS_KEPT)
        self._numbers: dict[str, int] = {}
        """Item -> its charges so far, proven or not."""
        self._proven: dict[str, int] = {}

    def resume(self, charged: Iterable[ItemCharged]) -> None:
        """Take up the charges of an earlier launcher."""
        for event in charged:
            self._numbers[event.item] = max(self._numbers.get(event.item, 0), event.number)
            self._proven[event.item] = self._proven.get(event.item, 0) + event.is_proven

    def note(self, death: Death) -> None:
        """See a death at once; it may explain another's."""
        self._noted.append(death)

    def judge(self, death: Death) -> Judgement:
        """Return what follows from a noted death, `NEIGHBOR_S` after it."""
        if death.cause in {DeathCause.CHARGED, DeathCause.START_AGAIN}:
            return Judgement(counts=False)
        is_known = death.items and all(noted.item != UNNAMED for noted in death.items)
        if death.cause is not DeathCause.CRASHED or not is_known or self._has_neighbor(death):
            return Judgement()
        earlier = [crash for crash in self._crashes if crash.at >= death.at - self._period_s]
        self._crashes.append(death)
        same = [crash for crash in earlier if crash.process == death.process]
        if len(same) >= self._crashes_max:
            return Judgement()
        if len(death.items) == 1:
            return self._charged(death.items, death.words, death.items[0])
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
        """Charge one item, if it is known, and make suspects of those with no charge yet."""
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
    """Return a death in words."""
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    why = " (from outside)" if cause is DeathCause.KILLED else ""
    return f"process {process} ended {how}{why}; see {log}"


class RestartBudgetError(PenstockError, RuntimeError):
    """A process died more often than the restart budget allows; the text names its log."""


class RunStuckError(PenstockError, RuntimeError):
    """A process cannot get past an event that it must not leave out; the text names its log."""


class RestartBudget:
    """Restart intensity and period: at most `intensity` failures within `period_s` are restarted.

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
