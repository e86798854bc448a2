"""Assigns users to the arms of an experiment: sticky, with a probability that is recorded.

The arm is a hash of the experiment's salt, the period and the user. Any number of gateways
therefore agree without a shared table, and a restart moves nobody.
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
    """The channel that answers a session, and the variant that its records name."""

    channel: str
    variant: str = NO_VARIANT
    propensity: float = 1.0
    """Probability with which this variant was chosen."""


class Arms:
    """The arms of the current experiment, from the log."""

    unsaved = ("_base",)

    def __init__(self, channel: str) -> None:
        """Start without an experiment.

        Args:
            channel: Channel that answers outside of experiments.

        """
        self._base = Route(channel=channel)
        self._experiment: ExperimentStarted | None = None
        self._num_decided = 0

    def started(self, event: ExperimentStarted) -> None:
        """Split the users from now on."""
        # Start and decision may arrive in either order: a decided experiment must not restart.
        if event.number >= self._num_decided:
            self._experiment = event

    def decided(self, event: ExperimentDecided) -> None:
        """Send everyone to the base channel again."""
        self._num_decided = max(self._num_decided, event.number + 1)
        if self._experiment is not None and self._experiment.number < self._num_decided:
            self._experiment = None

    def route(self, user: str, now: float) -> Route:
        """Return the route of a session that begins at `now` (Unix seconds)."""
        experiment = self._experiment
        if experiment is None:
            return self._base
        # Clocks of gateways differ: a request may seem to come before the experiment began.
        period = max(0, int((now - experiment.at) // experiment.sticky_s))
        draw = _draw(f"{experiment.salt}.{period}.{user}")
        arm = Arm.CANDIDATE if draw < experiment.share else Arm.STABLE
        return Route(
            channel=arm.value,
            variant=str(Variant(experiment.number, period, arm)),
            propensity=experiment.share if arm is Arm.CANDIDATE else 1.0 - experiment.share,
        )


def _draw(text: str) -> float:
    """Return a number in [0, 1), uniform over texts."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64
