"""When a replica's weights are so old, for so long, that training goes on without it.

The pacer grants no more than the oldest version in use allows, so a replica that gets no weights
(its relay is gone, its link is cut) would hold the whole run up. What it sampled would be too stale
to train anyway.
"""


class Lag:
    """The newest version published against the one that a replica holds."""

    def __init__(self, staleness_max: int = 0, lag_s_max: float = 60.0) -> None:
        """Start with nothing published.

        Args:
            staleness_max: Versions that training may be behind.
            lag_s_max: Seconds that a replica may be further behind than that.

        """
        self._staleness_max = staleness_max
        self._lag_s_max = lag_s_max
        self._head = -1
        self._since: float | None = None

    def published(self, policy_version: int) -> None:
        """Take note of a version."""
        self._head = max(self._head, policy_version)

    def is_lost(self, policy_version: int, now: float) -> bool:
        """Return whether the version held has been too old for too long."""
        if self._head - policy_version <= self._staleness_max:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since > self._lag_s_max
