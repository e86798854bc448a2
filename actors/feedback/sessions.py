"""One user session: its requests, their signals, rewards and samples. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from penstock.messages.feedback import (
    FeedbackReceived,
    InferenceRecorded,
    LeftOutReason,
    LiveSampleJoined,
)
from penstock.messages.rollout import TurnSummary
from penstock.messages.signals.declaration import SignalLevel, SignalSpec

FULL_WEIGHT = 1.0
"""Total weight up to which neutral signals are added, so that weak signals give weak rewards."""
UNTRUSTED_SHARE_MAX = 0.5
"""Maximum weight of all untrusted signals, relative to trusted ones where there are any."""


def reward_of(
    signals: Iterable[FeedbackReceived], declared: Mapping[str, SignalSpec]
) -> float | None:
    """Return the weighted mean score, mapped to [0, 1]; None if no signal counts.

    Example:
        A single `accept` of value 1 gives 1.0; with weight 0.01, 0.505. Together with a failed
        `tests_passed` of a trusted key it gives 0.33, and further accepts do not raise that.

    """
    totals, scores = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for signal in signals:
        spec = declared[signal.name]
        weight = spec.weight * signal.weight
        totals[signal.is_trusted] += weight
        scores[signal.is_trusted] += weight * spec.score(signal.value)
    if totals[True] + totals[False] <= 0:
        return None
    share = 1.0
    if totals[True] > 0 and totals[False] > 0:
        share = min(1.0, UNTRUSTED_SHARE_MAX * totals[True] / totals[False])
    # Weak signals are diluted with neutral ones instead of being amplified to a full reward.
    total = max(totals[True] + share * totals[False], FULL_WEIGHT)
    return (1.0 + (scores[True] + share * scores[False]) / total) / 2.0


TURNS_MAX = 256
"""Maximum turns per sample; a longer session becomes several samples."""
SIGNALS_MAX = 1024
"""Maximum pieces of feedback per session; further ones are left out."""


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded request, without its tokens."""

    request_id: str
    summary: TurnSummary
    variant: str
    propensity: float
    policy_version: int
    chain: str
    at: float
    """Unix time of the recording in seconds."""
    recorded_at: float
    """Time in the record; 0 in logs of earlier releases."""
    key_id: str
    """API key of the request."""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of feedback after its amendments."""

    root: str
    """Log key of the original feedback."""
    order: int
    """Order of arrival."""
    event: FeedbackReceived
    at: float = 0.0
    """When it was stored, unix seconds."""


class TurnRatings(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of turns by the signals at one moment."""

    rewards: list[float | None]
    """Reward of each turn in [0, 1]; None if no signal applies to it."""
    roots: list[str]
    """Roots of the signals that count."""

    @property
    def is_empty(self) -> bool:
        """Whether no turn has a reward."""
        return all(reward is None for reward in self.rewards)


@dataclass(kw_only=True)
class UserSession:
    """A user's session; a request without a session has one to itself."""

    session_id: str
    tenant: str
    user: str
    turns: dict[str, RecordedTurn] = field(default_factory=dict)
    """Turns by request, in the order of the log."""
    sample_of: dict[str, str] = field(default_factory=dict)
    """Sample id by request; requests without one are open."""
    samples: dict[str, LiveSampleJoined] = field(default_factory=dict)
    """Newest stored revision by sample id."""
    signals: dict[str, Signal] = field(default_factory=dict)
    """Signals by root."""
    ready_at: float = 0.0
    """Time before which nothing of the session is published."""

    @property
    def open(self) -> list[list[RecordedTurn]]:
        """Turns without a sample, grouped by chain, at most `TURNS_MAX` each."""
        found: dict[str, list[RecordedTurn]] = {}
        for name, turn in self.turns.items():
            if name not in self.sample_of:
                found.setdefault(turn.chain, []).append(turn)
        # By chain: requests of one session may belong to several conversations.
        return [turns[:TURNS_MAX] for turns in found.values()]

    def add(self, record: InferenceRecorded, now: float) -> None:
        """Add a request."""
        self.turns[record.request_id] = RecordedTurn(
            request_id=record.request_id,
            summary=record.turn.summary,
            variant=record.variant,
            propensity=record.propensity,
            policy_version=record.policy_version,
            chain=record.chain,
            at=record.recorded_at or now,
            recorded_at=record.recorded_at,
            key_id=record.key_id,
        )

    def rate(
        self, turns: Sequence[RecordedTurn], declared: Mapping[str, SignalSpec], now: float
    ) -> TurnRatings:
        """Return the rewards of turns of this session now."""
        counting = list(self._counting(declared, now))
        whole = [signal for signal, spec in counting if spec.level is SignalLevel.SESSION]
        single: dict[str, list[Signal]] = {}
        for signal, spec in counting:
            if spec.level is SignalLevel.REQUEST:
                single.setdefault(signal.event.request_id, []).append(signal)
        rewards: list[float | None] = []
        roots = {signal.root for signal in whole}
        for turn in turns:
            own = single.get(turn.request_id, [])
            roots.update(signal.root for signal in own)
            # Sorted, because float sums depend on their order, and the order of arrival must not
            # change a reward.
            reaching = sorted([*whole, *own], key=lambda signal: signal.root)
            rewards.append(reward_of((signal.event for signal in reaching), declared))
        return TurnRatings(rewards=rewards, roots=sorted(roots))

    def matures_at(self, declared: Mapping[str, SignalSpec], now: float) -> float | None:
        """Return when the next signal matures, or None."""
        times = [
            turn.at + declared[signal.event.name].maturity_s
            for signal in self.signals.values()
            if (turn := self.turns.get(signal.event.request_id))
        ]
        return min((time for time in times if time > now), default=None)

    def sample(
        self, turns: Sequence[RecordedTurn], rated: TurnRatings, revision: int
    ) -> LiveSampleJoined:
        """Return the sample of some turns with their rewards."""
        known = [reward for reward in rated.rewards if reward is not None]
        mean = sum(known) / len(known) if known else 0.0
        added = [0.0 if reward is None else reward - mean for reward in rated.rewards]
        first = turns[0]
        return LiveSampleJoined(
            sample_id=first.request_id,
            revision=revision,
            request_ids=[turn.request_id for turn in turns],
            turns=[turn.summary for turn in turns],
            reward=mean,
            turn_rewards=added if any(added) else [],
            unrated=[index for index, reward in enumerate(rated.rewards) if reward is None],
            session_id=self.session_id,
            tenant=self.tenant,
            user=self.user,
            feedback_ids=rated.roots,
            variant=first.variant,
            propensity=first.propensity,
            policy_version=min(turn.policy_version for turn in turns),
            key_ids=sorted({turn.key_id for turn in turns}),
            recorded_at=min(turn.recorded_at for turn in turns),
            evidence=self._evidence(turns),
        )

    def _counting(
        self, declared: Mapping[str, SignalSpec], now: float
    ) -> Iterator[tuple[Signal, SignalSpec]]:
        """Yield mature signals: the latest per user, name and target."""
        latest: dict[tuple[str, str, str, str], Signal] = {}
        for signal in self.signals.values():
            event = signal.event
            turn = self.turns.get(event.request_id)
            spec = declared[event.name]
            if turn is None or spec.kind.is_text or turn.at + spec.maturity_s > now:
                continue
            target = event.request_id if spec.level is SignalLevel.REQUEST else ""
            place = (event.tenant, event.user, event.name, target)
            if place not in latest or latest[place].order < signal.order:
                latest[place] = signal
        for place in sorted(latest):
            signal = latest[place]
            yield signal, declared[signal.event.name]

    def _evidence(self, turns: Sequence[RecordedTurn]) -> list[str]:
        chain = turns[0].chain
        names = [name for name, turn in self.turns.items() if turn.chain == chain]
        following = dict(pairwise(names))
        found = [following.get(turn.request_id, "") for turn in turns]
        return found if any(found) else []


def refusal(
    event: FeedbackReceived, declared: Mapping[str, SignalSpec], tenant: str
) -> LeftOutReason | None:
    """Return why a signal cannot count on a tenant's requests, or None if it can."""
    spec = declared.get(event.name)
    if spec is None:
        return LeftOutReason.UNDECLARED
    if event.is_trusted or (event.tenant == tenant and not spec.trusted_only):
        return None
    return LeftOutReason.NOT_ALLOWED
