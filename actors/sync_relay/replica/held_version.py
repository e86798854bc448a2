"""Which version a replica is to hold, of those that its region has. Pure.

```
 an evaluation is announced, and this replica serves them ─▶ its version, until it is over
 version:7 ─▶ 7     stable ─▶ where the channel points     newest ─▶ the newest relayed
```
"""

from penstock.actors.sync_relay.core.pins import Pins
from penstock.messages.generation import NEWEST, pinned_version


class HeldVersion:
    """One replica's choice."""

    def __init__(self, channel: str = NEWEST, *, evaluates: bool = False) -> None:
        """Know of nothing.

        Args:
            channel: Followed where no evaluation is under way.
            evaluates: Whether the replica serves evaluations.

        Raises:
            ConfigError: No such channel.

        """
        self._channel = channel
        self._pin = pinned_version(channel)
        self._evaluates = evaluates
        self.pins = Pins()
        self.newest = -1
        """The newest version relayed to the region."""

    @property
    def version(self) -> int | None:
        """The one version to hold; None to hold the newest."""
        if self._evaluates and self.pins.evaluations:
            return min(self.pins.evaluations.values())
        return self.pins.channels.get(self._channel) if self._pin is None else self._pin

    def relayed(self, policy_version: int) -> None:
        """Take note that the region has a version."""
        self.newest = max(self.newest, policy_version)
