"""Decides when a replica's weights have been too old for too long to serve training.

The pacer grants only what the oldest version in use allows. A replica that gets no weights (its
relay is gone or its link is down) would therefore stall the whole run, and its samples would be too
stale to train on anyway.
"""


class Lag:
    """How far a replica is behind the newest published version, and since when."""

    def __init__(self, staleness_max: int = 0, lag_s_max: float = 60.0) -> None:
        """Start with no version published.

        Args:
            staleness_max: Number of versions that training may be behind.
            lag_s_max: Seconds that a replica may be further behind than that.

        """
        self._staleness_max = staleness_max
        self._lag_s_max = lag_s_max
        self._head = -1
        self._since: float | None = None

    def published(self, policy_version: int) -> None:
        """Note a published version."""
        # The log may repeat old versions when the actor starts to follow it.
        self._head = max(self._head, policy_version)

    def is_lost(self, policy_version: int, now: float) -> bool:
        """Return whether the version that a replica holds has been too old for too long.

        Args:
            policy_version: Version that the replica holds.
            now: Monotonic time in seconds.

        """
        if self._head - policy_version <= self._staleness_max:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since > self._lag_s_max
