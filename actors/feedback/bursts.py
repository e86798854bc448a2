"""Bursts: far more feedback by one user than this user ever gave before. Pure.

Time is cut into windows. A user's feedback in a window is a burst from the signal on that makes it
more than `num_min` and more than `ratio` times the most of any window before, which is forgotten
slowly. So busy users, users who grow busier and a day on which all complain are none. What belongs
to a burst is held: no sample, pair or label of it is published until the quarantine is released.
A burst that was released is what its user usually gives from then on. Trusted keys are left alone.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from penstock.actors.feedback.config import BurstConfig
from penstock.actors.runtime.fair_table import FairTable
from penstock.messages.feedback import (
    FeedbackReceived,
    LiveSampleJoined,
    feedback_key,
    tenant_of,
)
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased

Judgment = PreferencePair | Label
KEEP = 0.999
"""What a window leaves of the most that came before."""
NUM_USERS_MAX = 100_000
"""Users who are remembered, and pieces of feedback that are held."""


class _Usage(msgspec.Struct, kw_only=True):
    window: int
    num_signals: int = 0
    usual: float = 0.0
    is_burst: bool = False


class Bursts:
    """What each user gave lately, and what is held."""

    def __init__(self, config: BurstConfig) -> None:
        self._config = config
        self._usage: FairTable[tuple[str, str], _Usage] = FairTable(
            NUM_USERS_MAX, lambda key, _: key[0]
        )
        self._held: FairTable[str, str] = FairTable(NUM_USERS_MAX, lambda key, _: tenant_of(key))
        """Feedback's log key -> its quarantine."""
        self._sizes: FairTable[str, tuple[_Usage, int]] = FairTable(
            NUM_USERS_MAX, lambda key, _: tenant_of(key)
        )
        """Quarantine -> whose it is, and how much was given in its window."""
        self._released: OrderedDict[str, None] = OrderedDict()
        self._judgments: FairTable[str, list[Judgment]] = FairTable(
            NUM_USERS_MAX, lambda key, _: tenant_of(key)
        )
        """Feedback's log key -> what it says for losses over preferences, held with it."""

    @property
    def num_held(self) -> int:
        """Pieces of feedback that are held."""
        return len(self._held)

    def add(self, event: FeedbackReceived, at: float) -> FeedbackQuarantined | None:
        """Take in a piece of feedback; return a quarantine that begins with it.

        Args:
            event: The feedback.
            at: When the log took it, unix seconds.

        """
        if event.is_trusted:
            return None
        window = int(at / self._config.window_s)
        user = (event.tenant, event.user)
        usage = self._usage[user] = self._usage.get(user) or _Usage(window=window)
        if window > usage.window:
            _close(usage, window)
        usage.num_signals += 1
        most = max(self._config.num_min, self._config.ratio * usage.usual)
        begins = not usage.is_burst and usage.num_signals > most
        usage.is_burst = usage.is_burst or begins
        if not usage.is_burst:
            return None
        quarantined = FeedbackQuarantined(
            tenant=event.tenant,
            user=event.user,
            window=usage.window,
            began_at=at,
            ends_at=(usage.window + 1) * self._config.window_s,
            num_signals=usage.num_signals,
            usual=usage.usual,
        )
        if quarantined.key() in self._released:
            usage.usual = max(usage.usual, usage.num_signals)
        else:
            self._sizes[quarantined.key()] = (usage, usage.num_signals)
            root = feedback_key(event.tenant, event.amends or event.feedback_id)
            self._held[root] = quarantined.key()
        return quarantined if begins else None

    def admit(self, judgments: Iterable[Judgment]) -> list[Judgment]:
        """Return those whose feedback is not held; the others follow when it is released."""
        found: list[Judgment] = []
        for judgment in judgments:
            if judgment.root in self._held:
                held = self._judgments.get(judgment.root) or []
                self._judgments[judgment.root] = [*held, judgment]
            else:
                found.append(judgment)
        return found

    def release(self, event: QuarantineReleased) -> list[Judgment]:
        """Let the feedback of a burst count, also what is still to be read of it, as usual.

        Returns what was held of it by `admit`.
        """
        if (known := self._sizes.pop(event.quarantine, None)) is not None:
            usage, num_signals = known
            usage.usual = max(usage.usual, num_signals)
        self._released[event.quarantine] = None
        if len(self._released) > NUM_USERS_MAX:
            self._released.popitem(last=False)
        roots = [root for root, name in self._held.items() if name == event.quarantine]
        for root in roots:
            del self._held[root]
        return [judgment for root in roots for judgment in self._judgments.pop(root, [])]

    def holds(self, sample: LiveSampleJoined) -> bool:
        """Return whether a sample counts feedback that is held."""
        return not self._held.keys().isdisjoint(sample.feedback_ids)


def _close(usage: _Usage, window: int) -> None:
    """End a window; those without feedback since then only let the past fade.

    A burst does not become usual, unless it is released.
    """
    counted = 0.0 if usage.is_burst else float(usage.num_signals)
    faded = usage.usual * KEEP ** (window - usage.window)
    usage.usual = max(faded, counted)
    usage.window, usage.num_signals, usage.is_burst = window, 0, False
