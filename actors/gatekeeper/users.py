"""Reduces live traffic to a few observations per user and period. Pure.

```
 InferenceRecorded ─▶ each reply ─────────────────────────────▶ RepliesSeen (so far)
                      `replies_per_user` of them, or the window ─▶ RepliesObserved, once
 LiveSampleJoined ──▶ `sessions_per_user` rated, or the window ──▶ RewardObserved, once
                      the window is over ──────────────────────▶ WindowEnded, once
```
Arms are drawn per user, so the user is the unit of the test: sessions of one user are correlated,
and a test over sessions would count one user's taste many times. Observations of replies do not
wait for ratings, so that replies too broken to be rated still count. Time is taken from the
records, not from a clock, so that every reader of the log makes the same observations in the same
order.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator

import msgspec

from penstock.actors.gatekeeper.config import LiveTestConfig
from penstock.messages.gates import NUM_TOOLS_MAX, Arm, ReplyFacts, Variant

NUM_USERS_FREE = 20
"""Number of users of a tenant that count regardless of the tenant's share."""
_CROWDED = 1.5
"""Largest share of a tenant when there are few, in multiples of an equal share."""
NUM_SESSIONS_MAX = 64
"""Largest number of sessions counted per user and window."""


Measures = dict[str, float]
"""Measures by guard, each in 0..1."""
LENGTH_SCALE = 20.0
"""Divisor of log2(1 + tokens), larger than that of any reply, so that the measure is at most 1."""


class Replies(msgspec.Struct, kw_only=True):
    """Sums over a user's replies."""

    num: int = 0
    log_tokens: float = 0.0
    """Sum of log2(1 + tokens)."""
    num_empty: int = 0
    num_invalid: int = 0
    num_questions: int = 0
    num_edits: int = 0
    """Number of replies that call a tool which changes files."""
    tools: dict[str, int] = {}

    def add(self, facts: ReplyFacts, edit_tools: frozenset[str]) -> None:
        """Count one reply."""
        self.num += 1
        self.log_tokens += math.log2(1.0 + facts.num_tokens)
        self.num_empty += facts.is_empty
        self.num_invalid += facts.is_invalid
        self.num_questions += facts.is_question
        self.num_edits += not edit_tools.isdisjoint(facts.tools)
        for name, count in facts.tools.items():
            if name in self.tools or len(self.tools) < NUM_TOOLS_MAX:
                self.tools[name] = self.tools.get(name, 0) + count

    def measures(self) -> Measures:
        """Return the measures that guards compare; empty without replies."""
        if not self.num:
            return {}
        return {
            "reply_length": min(1.0, self.log_tokens / self.num / LENGTH_SCALE),
            "empty_replies": self.num_empty / self.num,
            "invalid_calls": self.num_invalid / self.num,
            "question_rate": self.num_questions / self.num,
            "edit_rate": self.num_edits / self.num,
        }


class RunningReplyMeasures(msgspec.Struct, frozen=True):
    """Measures of a user's replies so far, with those before the newest reply."""

    arm: Arm
    before: Measures
    after: Measures


class ReplyObservation(msgspec.Struct, frozen=True):
    """A user's first replies, complete and observed once."""

    arm: Arm
    share: float
    """Probability of the candidate's arm."""
    replies: Replies
    tenant: str = ""


class RewardObservation(msgspec.Struct, frozen=True):
    """A user's mean reward over the first rated sessions."""

    arm: Arm
    share: float
    reward: float
    """Mean reward over the rated sessions."""
    num_rated: int
    tenant: str = ""


class WindowEnd(msgspec.Struct, frozen=True):
    """The end of a user's window, with the share of sessions that nobody rated."""

    arm: Arm
    share: float
    unrated: float
    """Share of the sessions without a rating."""
    tenant: str = ""


Observation = RunningReplyMeasures | ReplyObservation | RewardObservation | WindowEnd


class _OpenWindow(msgspec.Struct, kw_only=True):
    tenant: str
    arm: Arm
    share: float
    since: float
    sessions: set[str] = msgspec.field(default_factory=set[str])
    rewards: dict[str, float] = {}
    replies: Replies = msgspec.field(default_factory=Replies)
    has_replies: bool = False
    """Whether the first replies are already observed."""
    has_reward: bool = False


class Users:
    """The users of one experiment."""

    def __init__(self, config: LiveTestConfig, edit_tools: frozenset[str]) -> None:
        self._config = config
        self._edit_tools = edit_tools
        self._open: OrderedDict[tuple[str, str, int], _OpenWindow] = OrderedDict()
        self._closed: set[tuple[str, str, int]] = set()
        self._tenants: Counter[str] = Counter()
        """Number of counted users by tenant."""
        self._now = 0.0
        self.num_uncounted = 0
        """Number of replies to users over the limit of their tenant or of the experiment."""

    def add_reply(  # noqa: PLR0913 - the fields of a record
        self,
        variant: Variant,
        propensity: float,
        *,
        tenant: str,
        user: str,
        session: str,
        facts: ReplyFacts,
        at: float,
    ) -> Iterator[Observation]:
        """Add one reply; yield the observations that are now complete."""
        # Records of several gateways may be slightly out of order; time must not run backward.
        self._now = max(self._now, at)
        yield from self._expire()
        found = self._find(variant, propensity, tenant, user)
        if found is None:
            return
        if len(found.sessions) < NUM_SESSIONS_MAX:
            found.sessions.add(session)
        before = found.replies.measures()
        found.replies.add(facts, self._edit_tools)
        yield RunningReplyMeasures(found.arm, before, found.replies.measures())
        if found.replies.num >= self._config.replies_per_user:
            yield from _observe_replies(found)

    def add_reward(  # noqa: PLR0913 - the fields of a sample
        self,
        variant: Variant,
        propensity: float,
        *,
        tenant: str,
        user: str,
        sample: str,
        reward: float | None,
    ) -> Iterator[Observation]:
        """Set or revise a session's reward; yield the observations that are now complete.

        A reward of None withdraws the earlier one.
        """
        found = self._find(variant, propensity, tenant, user)
        if found is None:
            return
        if reward is None:
            found.rewards.pop(sample, None)
            return
        if len(found.rewards) < NUM_SESSIONS_MAX or sample in found.rewards:
            found.rewards[sample] = min(1.0, max(0.0, reward))
        if len(found.rewards) >= self._config.sessions_per_user:
            yield from _observe_reward(found)

    def _find(
        self, variant: Variant, propensity: float, tenant: str, user: str
    ) -> _OpenWindow | None:
        """Return a user's open window in a period; None if it has ended or a limit is reached.

        A user whose arm changed within the period is not counted either.
        """
        key = (tenant, user, variant.period)
        if key in self._closed:
            return None
        found = self._open.get(key)
        if found is None:
            if not self._has_room(tenant):
                self.num_uncounted += 1
                return None
            self._tenants[tenant] += 1
            share = propensity if variant.arm is Arm.CANDIDATE else 1.0 - propensity
            found = self._open[key] = _OpenWindow(
                tenant=tenant, arm=variant.arm, share=share, since=self._now
            )
        # A user whose arm changed within a period saw both versions and counts for neither.
        return found if found.arm is variant.arm else None

    def _has_room(self, tenant: str) -> bool:
        """Return whether one more user of a tenant counts."""
        # Tenants choose their own user ids, and could invent enough users to decide the test. The
        # limit does not depend on the arm, so the comparison stays unbiased.
        num = self._tenants.total()
        share = max(self._config.tenant_share_max, _CROWDED / max(1, len(self._tenants)))
        allowed = NUM_USERS_FREE + share * num
        return num < self._config.users_max and self._tenants[tenant] < allowed

    def _expire(self) -> Iterator[Observation]:
        # Windows are in order of their start: the first that is still open ends the search.
        while self._open:
            key, oldest = next(iter(self._open.items()))
            if self._now - oldest.since <= self._config.user_window_s:
                return
            del self._open[key]
            # Remembered, so that later replies of the same period do not count the user again.
            self._closed.add(key)
            yield from _observe_replies(oldest)
            yield from _observe_reward(oldest)
            num_rated, num = len(oldest.rewards), len(oldest.sessions)
            unrated = 1.0 - min(1.0, num_rated / num) if num else 0.0
            yield WindowEnd(oldest.arm, oldest.share, unrated, oldest.tenant)


def _observe_replies(entry: _OpenWindow) -> Iterator[Observation]:
    if not entry.has_replies and entry.replies.num:
        entry.has_replies = True
        yield ReplyObservation(entry.arm, entry.share, entry.replies, entry.tenant)


def _observe_reward(entry: _OpenWindow) -> Iterator[Observation]:
    # Once per user and period: observations of one user are not independent.
    if not entry.has_reward and entry.rewards:
        entry.has_reward = True
        rewards = entry.rewards.values()
        mean = sum(rewards) / len(rewards)
        yield RewardObservation(entry.arm, entry.share, mean, len(rewards), entry.tenant)
