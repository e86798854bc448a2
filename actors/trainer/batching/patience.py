"""How long a step waits for stragglers before it goes without them. Pure.

Where late groups are dropped or withheld a step need not wait for any; a short wait saves tokens of
slow tasks. No bit depends on it but through the manifest that comes of it, which is on the log.
"""

import math

from penstock.actors.trainer.config import TrainerConfig


class Patience:
    """The wait of one step after the other; times are of a clock that never goes back."""

    def __init__(self, config: TrainerConfig) -> None:
        """Read how long a step may wait: with `pace` as long as it takes."""
        is_paced = config.staleness_policy == "pace"
        self._wait_s = math.inf if is_paced else config.straggler_wait_s
        self._since: float | None = None

    def is_left(self, now: float) -> bool:
        """Return whether the next step may still wait."""
        return self._wait_s > 0.0 and not self.is_over(now)

    def is_over(self, now: float) -> bool:
        """Return whether the next step has waited for as long as it may."""
        return self._since is not None and now >= self._since + self._wait_s

    def begin(self, now: float) -> None:
        """See that the next step waits for stragglers, now or already."""
        if self._since is None:
            self._since = now

    def end(self) -> None:
        """See that the step was taken."""
        self._since = None
