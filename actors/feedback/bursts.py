"""Bursts: far more feedback by a user than ever before. Pure.

Time is divided into windows. Feedback of a user is a burst once a window has more than `num_min`
signals and more than `ratio` times the user's maximum of earlier windows, which decays slowly. So
neither busy users, nor growing use, nor a day of complaints by everybody is a burst. Samples, pairs
and labels of a burst are held until the quarantine is released, which also raises the user's
maximum. Trusted keys are exempt.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from penstock.actors.feedback.config import BurstConfig
from penstock.actors.runtime.fair_table import FairTable
from penstock.messages.feedback import FeedbackReceived, LiveSampleJoined, feedback_key, tenant_of
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased

Judgment = PreferencePair | Label
KEEP = 0.999
"""Decay of a user's maximum per window."""
NUM_USERS_MAX = 100_000
"""Maximum users remembered, and maximum pieces of feedback held."""


class _Usage(msgspec.Struct, kw_only=True):
    window: int
    num_signals: int = 0
    usual: float = 0.0
    is_burst: bool = False


class Bursts:
    """Recent feedback counts by user, and held feedback."""

    def __init__(self, config: BurstConfig) -> None:
        self._config = config
        self._usage: FairTable[tuple[str, str], _Usage] = FairTable(NUM_USERS_MAX, _tenant_of_user)
        self._held: FairTable[str, str] = FairTable(NUM_USERS_MAX, lambda root, _: tenant_of(root))
        """Feedback's log key -> its quarantine."""
        self._sizes: FairTable[str, tuple[str, str, int]] = FairTable(
            NUM_USERS_MAX, _tenant_of_size
        )
        """Quarantine -> tenant and user whose it is, and how much was given in its window."""
        self._released: OrderedDict[str, None] = OrderedDict()
        self._judgments: OrderedDict[str, list[Judgment]] = OrderedDict()
        """Held pairs and labels by the feedback's log key."""

    @property
    def num_held(self) -> int:
        """Number of held pieces of feedback."""
        return len(self._held)

    def add(self, event: FeedbackReceived, at: float) -> FeedbackQuarantined | None:
        """Count a piece of feedback; return a quarantine if one begins with it.

        Args:
            at: Unix time at which the log stored it, in seconds.

        """
        if event.is_trusted:
            return None
        window = int(at / self._config.window_s)
        user = (event.tenant, event.user)
        self._usage[user] = usage = self._usage.get(user) or _Usage(window=window)
        # Events of an earlier window may still arrive; they count in the present one.
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
        # After a restart the log is read again: the release may come before the burst's signals.
        if quarantined.key() in self._released:
            usage.usual = max(usage.usual, usage.num_signals)
        else:
            self._sizes[quarantined.key()] = (*user, usage.num_signals)
            root = feedback_key(event.tenant, event.amends or event.feedback_id)
            self._held[root] = quarantined.key()
        return quarantined if begins else None

    def admit(self, judgments: Iterable[Judgment]) -> list[Judgment]:
        """Return the judgments whose feedback is not held; `release` returns the others."""
        found: list[Judgment] = []
        for judgment in judgments:
            if judgment.root in self._held:
                self._judgments.setdefault(judgment.root, []).append(judgment)
            else:
                found.append(judgment)
        # The oldest go first: held feedback is worth less the longer it is held.
        while len(self._judgments) > NUM_USERS_MAX:
            self._judgments.popitem(last=False)
        return found

    def release(self, event: QuarantineReleased) -> list[Judgment]:
        """Release a burst, including signals yet to be read, and return its held judgments."""
        if (known := self._sizes.pop(event.quarantine, None)) is not None:
            tenant, user, num_signals = known
            if usage := self._usage.get((tenant, user)):
                usage.usual = max(usage.usual, num_signals)
        self._released[event.quarantine] = None
        if len(self._released) > NUM_USERS_MAX:
            self._released.popitem(last=False)
        roots = [root for root, name in self._held.items() if name == event.quarantine]
        for root in roots:
            del self._held[root]
        return [judgment for root in roots for judgment in self._judgments.pop(root, [])]

    def holds(self, sample: LiveSampleJoined) -> bool:
        """Return whether a sample is based on held feedback."""
        return not self._held.keys().isdisjoint(sample.feedback_ids)


def _tenant_of_user(user: tuple[str, str], _usage: _Usage) -> str:
    return user[0]


def _tenant_of_size(_quarantine: str, size: tuple[str, str, int]) -> str:
    return size[0]


def _close(usage: _Usage, window: int) -> None:
    # A burst does not raise the user's maximum, unless it is released.
    counted = 0.0 if usage.is_burst else float(usage.num_signals)
    faded = usage.usual * KEEP ** (window - usage.window)
    usage.usual = max(faded, counted)
    usage.window, usage.num_signals, usage.is_burst = window, 0, False
