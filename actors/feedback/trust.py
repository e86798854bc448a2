"""Trust: how often a user's judgments agree with verified ones of the same requests. Pure.

Verified is what a key with `is_trusted` says, a test harness for instance. Where both are there,
they agree or not; a user is believed until this happens too rarely: with a share p of agreements
(after `NUM_PRIOR` that count as three in four), the weight of the user's samples is

    min(1, max(0, (p - 1/2) / (1/4)))

so that who agrees no more often than a coin has none.
"""

import msgspec

from penstock.actors.feedback.config import JoinConfig
from penstock.actors.runtime.fair_table import FairTable
from penstock.messages.feedback import FeedbackReceived, LiveSampleJoined
from penstock.messages.signals.declaration import by_name

NUM_PRIOR = 8
NUM_JUDGES_MAX = 64
"""Users who are compared on one request."""
BELIEVED = 0.75
"""Share of agreements from which on a user's weight is whole."""
COIN = 0.5

User = tuple[str, str]


class _Judged(msgspec.Struct, kw_only=True):
    tenant: str
    """Tenant of the first judgment."""
    verified: float = 0.0
    """Sum of verified scores."""
    by_user: dict[User, float] = {}
    """User -> first score."""


class Trust:
    """Agreements by user, over the most recent requests."""

    def __init__(self, config: JoinConfig) -> None:
        self._declared = by_name(config.signals)
        self._judged: FairTable[str, _Judged] = FairTable(
            config.num_open_max, lambda _, judged: judged.tenant
        )
        self._agreed: FairTable[User, list[int]] = FairTable(
            config.num_open_max, lambda user, _: user[0]
        )
        """User -> agreements, comparisons."""

    def add(self, event: FeedbackReceived) -> None:
        """Take in a judgment; the first of each user on a request is compared."""
        spec = self._declared.get(event.name)
        score = spec.score(event.value) * spec.weight if spec else 0.0
        if score == 0.0:
            return
        judged = self._judged.setdefault(event.request_id, _Judged(tenant=event.tenant))
        user = (event.tenant, event.user)
        if event.is_trusted:
            if judged.verified == 0.0:
                judged.verified = score
                for other, given in judged.by_user.items():
                    self._compare(other, given, score)
        elif user not in judged.by_user and len(judged.by_user) < NUM_JUDGES_MAX:
            judged.by_user[user] = score
            if judged.verified != 0.0:
                self._compare(user, score, judged.verified)

    def weight(self, sample: LiveSampleJoined) -> float:
        """Return the weight of a user's samples, 0 to 1."""
        agreed, compared = self._agreed.get((sample.tenant, sample.user), [0, 0])
        share = (agreed + BELIEVED * NUM_PRIOR) / (compared + NUM_PRIOR)
        return min(1.0, max(0.0, (share - COIN) / (BELIEVED - COIN)))

    def _compare(self, user: User, given: float, verified: float) -> None:
        counts = self._agreed[user] = self._agreed.get(user) or [0, 0]
        counts[0] += (given > 0) == (verified > 0)
        counts[1] += 1
