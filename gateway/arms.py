"""Which arm of an experiment serves a user: sticky, and with a probability that is on record.

An arm is a hash of the experiment's salt, the period and the user, so that any number of gateways
agree without a table, and no one is moved by a restart.
"""

import hashlib

import msgspec

from penstock.messages.gates import (
    NO_VARIANT,
    Arm,
    ExperimentDecided,
    ExperimentStarted,
    Variant,
)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers a session."""

    channel: str
    variant: str = NO_VARIANT
    propensity: float = 1.0
    """Probability with which this variant was chosen."""


class Arms:
    """The arms of the experiment under way; follows the log."""

    def __init__(self, channel: str) -> None:
        """Start without an experiment.

        Args:
            channel: Who answers outside of experiments.

        """
        self._base = Route(channel=channel)
        self._experiment: ExperimentStarted | None = None
        self._num_decided = 0

    def started(self, event: ExperimentStarted) -> None:
        """Divide the users from now on."""
        if event.number >= self._num_decided:
            self._experiment = event

    def decided(self, event: ExperimentDecided) -> None:
        """Send everyone to the base channel again."""
        self._num_decided = max(self._num_decided, event.number + 1)
        if self._experiment is not None and self._experiment.number < self._num_decided:
            self._experiment = None

    def route(self, user: str, now: float) -> Route:
        """Return who answers a session that begins at `now` (unix seconds)."""
        experiment = self._experiment
        if experiment is None:
            return self._base
        period = max(0, int((now - experiment.at) // experiment.sticky_s))
        drawn = _draw(f"{experiment.salt}.{period}.{user}")
        arm = Arm.CANDIDATE if drawn < experiment.share else Arm.STABLE
        return Route(
            channel=arm.value,
            variant=str(Variant(experiment.number, period, arm)),
            propensity=experiment.share if arm is Arm.CANDIDATE else 1.0 - experiment.share,
        )


def _draw(text: str) -> float:
    """Return a number of [0, 1) that looks uniform over texts."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64
