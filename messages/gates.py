"""Gates between training and users: the candidate, its experiment, and the decision.

```
 CandidateChosen ─▶ quality bar, offline evaluation ─▶ ExperimentStarted ─▶ ExperimentDecided
                                  └─────────────── refused ────────────────────────┘
```
Each carries the candidate's number, which is its key: however many gatekeepers there are, the log
keeps one of each.
"""

import re
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    UnitInterval,
)

NO_VARIANT = "current"
"""Variant of what is answered while no experiment is under way."""
NUM_TOOLS_MAX = 32
"""Tools told apart in one reply."""
_VARIANT = re.compile(r"e(\d{1,9})\.(\d{1,9})\.(stable|candidate)", re.ASCII)
Share = Annotated[float, msgspec.Meta(ge=0.05, le=0.95)]
"""Of the users, in one arm: neither so small that one user outweighs all others."""


class Arm(StrEnum):
    """The two sides of an experiment, named like the channels that serve them."""

    STABLE = "stable"
    CANDIDATE = "candidate"


class Variant(msgspec.Struct, frozen=True):
    """What `variant` of a request says."""

    number: int
    """Of the candidate."""
    period: int
    """Arms are drawn again in each."""
    arm: Arm

    def __str__(self) -> str:
        """Return e.g. `e4.0.candidate`."""
        return f"e{self.number}.{self.period}.{self.arm}"


def parse_variant(text: str) -> Variant | None:
    """Return what a request's variant says, or None where it took part in no experiment."""
    found = _VARIANT.fullmatch(text)
    return Variant(int(found[1]), int(found[2]), Arm(found[3])) if found else None


class ReplyFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of one reply, without its content: what guards need of it."""

    num_tokens: NonNegativeInt = 0
    is_empty: bool = False
    """Neither text nor a call."""
    is_invalid: bool = False
    """A call that does not parse, or of a tool that was not offered."""
    is_question: bool = False
    """Ends by asking the user, and calls nothing."""
    num_calls: NonNegativeInt = 0
    tools: dict[str, NonNegativeInt] = {}
    """Calls by tool, of the first `NUM_TOOLS_MAX` tools."""


class CandidateChosen(Event, frozen=True, kw_only=True):
    """Gatekeeper -> itself: this version is to pass the gates next."""

    stream: ClassVar[Stream] = Stream.CONTROL
    number: NonNegativeInt
    """Candidates before this one."""
    policy_version: NonNegativeInt
    stable_version: NonNegativeInt
    """What it is compared with."""
    at: NonNegativeFloat
    """Unix seconds."""

    def key(self) -> str:
        """One per number: two gatekeepers choose one candidate."""
        return str(self.number)


class ExperimentStarted(Event, frozen=True, kw_only=True):
    """Gatekeeper -> gateways: from now on users are divided into two arms."""

    stream: ClassVar[Stream] = Stream.CONTROL
    number: NonNegativeInt
    policy_version: NonNegativeInt
    stable_version: NonNegativeInt
    share: Share
    """Probability with which a user is served by the candidate."""
    salt: str
    """Makes the arms of this experiment independent of every other's."""
    sticky_s: PositiveFloat
    """Length of a period, in which a user stays in one arm."""
    at: NonNegativeFloat
    """Unix seconds; periods count from here."""

    def key(self) -> str:
        """One per candidate."""
        return str(self.number)


class Decision(StrEnum):
    """How a candidate ended."""

    PROMOTED = "promoted"
    """It is the stable version."""
    ROLLED_BACK = "rolled_back"
    """Shown to be worse, in an evaluation or by users."""
    EXPIRED = "expired"
    """Neither was shown in time."""
    ABANDONED = "abandoned"
    """A person moved a channel meanwhile."""


class GateState(StrEnum):
    """What a gate says now."""

    PASSED = "passed"
    WAITING = "waiting"
    """Not enough is known."""
    FAILED = "failed"
    """It blocks promotion."""
    REJECTED = "rejected"
    """It demands a rollback."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One condition of promotion."""

    name: str
    state: GateState
    words: str
    """What was found and what is expected."""
    value: float = 0.0
    """The candidate's."""
    baseline: float = 0.0
    """The stable version's."""
    bound: float = 0.0
    num_candidate: int = 0
    """Samples: users, tasks or tokens, as `words` says."""
    num_stable: int = 0


class ExperimentDecided(Event, frozen=True, kw_only=True):
    """Gatekeeper -> gateways, monitor: the candidate's end; its users are stable's again.

    After `PROMOTED` the gatekeeper moves the channel `stable`.
    """

    stream: ClassVar[Stream] = Stream.CONTROL
    number: NonNegativeInt
    decision: Decision
    policy_version: NonNegativeInt
    stable_version: NonNegativeInt
    reason: str
    gates: list[Gate] = []
    """As they stood."""
    at: NonNegativeFloat
    """Unix seconds."""

    def key(self) -> str:
        """One per candidate: nobody can decide twice."""
        return str(self.number)


class ArmView(msgspec.Struct, frozen=True, kw_only=True):
    """One arm in figures; values are rewards per user."""

    arm: Arm
    policy_version: int
    num_users: int = 0
    """Users whose reward is in the test."""
    num_sessions: int = 0
    reward_mean: float = 0.0
    ips: float = 0.0
    snips: float = 0.0
    doubly_robust: float = 0.0


class ExperimentView(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate, its gates and its experiment at one moment."""

    number: int
    policy_version: int
    stable_version: int
    phase: str
    """offline, arms (users are divided), or the decision."""
    blocked_by: str = ""
    """The first gate that blocks promotion, in words."""
    gates: list[Gate] = []
    arms: list[ArmView] = []
    difference: float = 0.0
    """Candidate minus stable, doubly robust."""
    difference_low: float = -1.0
    """Bounds that hold at any time, at the test's confidence."""
    difference_high: float = 1.0
    evidence_better: float = 1.0
    """E-values: 1 / alpha decides."""
    evidence_worse: float = 1.0
    share: UnitInterval = 0.0
    num_sessions_missing: int = 0
    """Per arm, for the stated effect at the stated power; 0: enough."""
    seconds_missing: float = -1.0
    """At the traffic so far; -1: unknown."""


class GateEvaluated(Event, frozen=True, kw_only=True):
    """Gatekeeper -> monitor: where the candidate stands; when it changes, at most every 10 s."""

    stream: ClassVar[Stream] = Stream.METRICS
    view: ExperimentView

    def key(self) -> str:
        """Name the candidate; the latest counts."""
        return str(self.view.number)
