"""Release gates between training and users: the candidate, its experiment, and the decision.

```
 CandidateChosen ─▶ quality bar, offline evaluation ─▶ ExperimentStarted ─▶ ExperimentDecided
                                  └─────────────── refused ────────────────────────┘
```
The key of each event is the candidate's number, so the log keeps one of each however many
gatekeepers run.
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
"""Variant recorded with requests that are answered while no experiment is running."""
NUM_TOOLS_MAX = 32
"""Maximum number of different tools counted in one reply."""
# Nine digits at most, so that the numbers of a forged variant stay small.
_VARIANT = re.compile(r"e(\d{1,9})\.(\d{1,9})\.(stable|candidate)", re.ASCII)
Share = Annotated[float, msgspec.Meta(ge=0.05, le=0.95)]
"""Share of users in one arm; bounded so that no single user dominates the smaller arm."""


class Arm(StrEnum):
    """The two sides of an experiment, named like the channels that serve them."""

    STABLE = "stable"
    CANDIDATE = "candidate"


class Variant(msgspec.Struct, frozen=True):
    """Parsed form of a request's `variant`: candidate, period and arm."""

    number: int
    """Number of the candidate."""
    period: int
    """Number of the period; users are reassigned to arms at the start of each period."""
    arm: Arm

    def __str__(self) -> str:
        """Return the form used in requests, e.g. `e4.0.candidate`."""
        return f"e{self.number}.{self.period}.{self.arm}"


def parse_variant(text: str) -> Variant | None:
    """Parse a request's variant; return None if the request took part in no experiment."""
    found = _VARIANT.fullmatch(text)
    return Variant(int(found[1]), int(found[2]), Arm(found[3])) if found else None


class ReplyFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of one reply, without its content, for the gatekeeper's guards."""

    num_tokens: NonNegativeInt = 0
    is_empty: bool = False
    """Whether the reply has neither text nor a call."""
    is_invalid: bool = False
    """Whether a call does not parse or names a tool that was not offered."""
    is_question: bool = False
    """Whether the reply ends with a question to the user and has no call."""
    num_calls: NonNegativeInt = 0
    tools: dict[str, NonNegativeInt] = {}
    """Number of calls by tool, for the first `NUM_TOOLS_MAX` tools."""


class CandidateChosen(Event, frozen=True, kw_only=True):
    """Gatekeeper -> itself: this version is evaluated next."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("number",)
    number: NonNegativeInt
    """Number of candidates before this one."""
    policy_version: NonNegativeInt
    stable_version: NonNegativeInt
    """Version that the candidate is compared with."""
    at: NonNegativeFloat

    """Time of the event in Unix seconds."""


class ExperimentStarted(Event, frozen=True, kw_only=True):
    """Gatekeeper -> gateways: from now on, users are split into two arms."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("number",)
    number: NonNegativeInt
    policy_version: NonNegativeInt
    stable_version: NonNegativeInt
    share: Share
    """Probability that a user is served by the candidate."""
    salt: str
    """Salt of the users' hashes, so that arms of different experiments are independent."""
    sticky_s: PositiveFloat
    """Seconds in a period, during which a user stays in one arm."""
    at: NonNegativeFloat
    """Start of the first period in Unix seconds."""


class Decision(StrEnum):
    """Outcome of a candidate."""

    PROMOTED = "promoted"
    """The candidate became the stable version."""
    ROLLED_BACK = "rolled_back"
    """An evaluation or users' rewards showed it to be worse."""
    EXPIRED = "expired"
    """Neither better nor worse was shown in time."""
    ABANDONED = "abandoned"
    """A person moved a channel in the meantime."""


class GateState(StrEnum):
    """Current state of a gate."""

    PASSED = "passed"
    WAITING = "waiting"
    """There is not enough data yet."""
    FAILED = "failed"
    """The gate blocks promotion."""
    REJECTED = "rejected"
    """The gate demands a rollback."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One condition of promotion."""

    name: str
    state: GateState
    words: str
    """Explanation: what was found and what is expected."""
    value: float = 0.0
    """Measured value of the candidate."""
    baseline: float = 0.0
    """Measured value of the stable version."""
    bound: float = 0.0
    """Limit that `value` is compared with."""
    num_candidate: int = 0
    """Sample size of the candidate, in users, tasks or tokens, as `words` says."""
    num_stable: int = 0


class ExperimentDecided(Event, frozen=True, kw_only=True):
    """Gatekeeper -> gateways, monitor: the experiment is over; all users get the stable version.

    After `PROMOTED`, the gatekeeper moves the channel `stable` to the candidate.
    """

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("number",)
    number: NonNegativeInt
    decision: Decision
    policy_version: NonNegativeInt
    stable_version: NonNegativeInt
    reason: str
    gates: list[Gate] = []
    """Gates at the time of the decision."""
    at: NonNegativeFloat
    """Time of the event in Unix seconds."""


class ArmView(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one arm; rewards are per user."""

    arm: Arm
    policy_version: int
    num_users: int = 0
    """Number of users whose reward is part of the test."""
    num_sessions: int = 0
    reward_mean: float = 0.0
    ips: float = 0.0
    snips: float = 0.0
    doubly_robust: float = 0.0


class ExperimentView(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of a candidate, its gates and its experiment."""

    number: int
    policy_version: int
    stable_version: int
    phase: str
    """Phase: `offline`, `arms` (users are split), or the decision."""
    blocked_by: str = ""
    """Explanation by the first gate that blocks promotion."""
    gates: list[Gate] = []
    arms: list[ArmView] = []
    difference: float = 0.0
    """Doubly robust estimate of the candidate's reward minus the stable version's."""
    difference_low: float = -1.0
    """Lower confidence bound of `difference`, valid at any time (`difference_high`: upper)."""
    difference_high: float = 1.0
    evidence_better: float = 1.0
    """E-value that the candidate is better (`evidence_worse`: worse); 1 / alpha decides."""
    evidence_worse: float = 1.0
    share: UnitInterval = 0.0
    num_sessions_missing: int = 0
    """Sessions still needed per arm to detect the configured effect at the configured power."""
    seconds_missing: float = -1.0
    """Estimated seconds until enough sessions, at the traffic so far; -1 if unknown."""


class GateEvaluated(Event, frozen=True, kw_only=True):
    """Gatekeeper -> monitor: state of the candidate, sent on changes, at most every 10 s."""

    stream: ClassVar[Stream] = Stream.METRICS
    view: ExperimentView

    def key(self) -> str:
        """Return the key: the newest event per candidate counts."""
        return str(self.view.number)
