"""Trust: how often a user's judgments agree with verified ones of the same requests. Pure.

Verified judgments come from keys with `is_trusted`, such as a test harness. With a share p of
agreements (including a prior of `NUM_PRIOR` comparisons, three quarters of which agree), the weight
of the user's samples is

    min(1, max(0, (p - 1/2) / (1/4)))

so that a user who agrees no more often than a coin toss has no weight.
"""

from collections import OrderedDict

import msgspec

from penstock.actors.feedback.config import JoinConfig
from penstock.actors.runtime.fair_table import FairTable
from penstock.messages.feedback import FeedbackReceived, LiveSampleJoined
from penstock.messages.signals.declaration import by_name

NUM_PRIOR = 8
NUM_JUDGES_MAX = 64
"""Maximum users compared per request."""
BELIEVED = 0.75
"""Share of agreements from which on a user has full weight."""
COIN = 0.5

User = tuple[str, str]


class _RequestScores(msgspec.Struct, kw_only=True):
    verified: float = 0.0
    """First verified score; 0 if there is none."""
    by_user: dict[User, float] = {}
    """First score of each user."""


class Trust:
    """Agreements by user, over the most recent requests."""

    def __init__(self, config: JoinConfig) -> None:
        self._num_max = config.num_open_max
        self._declared = by_name(config.signals)
        self._judged: OrderedDict[str, _RequestScores] = OrderedDict()
        self._agreed: FairTable[User, list[int]] = FairTable(self._num_max, lambda user, _: user[0])
        """[agreements, comparisons] by user."""

    def add(self, event: FeedbackReceived) -> None:
        """Add a judgment; only a user's first one on a request is compared."""
        spec = self._declared.get(event.name)
        score = spec.score(event.value) * spec.weight if spec else 0.0
        if score == 0.0:
            return
        judged = self._judged.setdefault(event.request_id, _RequestScores())
        if len(self._judged) > self._num_max:
            self._judged.popitem(last=False)
        user = (event.tenant, event.user)
        if event.is_trusted:
            if judged.verified == 0.0:
                judged.verified = score
                for other, given in judged.by_user.items():
                    self._compare(other, given, score)
        # Only the first judgment: a user could otherwise correct it after the verified one.
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
        agreed, compared = self._agreed.get(user, [0, 0])
        self._agreed[user] = [agreed + ((given > 0) == (verified > 0)), compared + 1]
