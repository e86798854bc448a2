"""Settings of the feedback join."""

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval
from penstock.messages.signals.declaration import SignalSpec, by_name
from penstock.messages.signals.defaults import DEFAULT_SIGNALS


class BurstConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a user's feedback is held as a burst."""

    window_s: PositiveFloat = 600.0
    """Feedback is counted over so long."""
    num_min: PositiveInt = 120
    """No window with at most so many is a burst."""
    ratio: PositiveFloat = 4.0
    """Nor one with at most so many times the most that the user gave in a window before."""


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How feedback becomes a reward."""

    signals: tuple[SignalSpec, ...] = DEFAULT_SIGNALS
    """All that may be sent; a table of its own replaces the default ones."""
    reward_wait_s: NonNegativeFloat = 5.0
    """A session is joined no sooner after its last request: its next turn, and several signals,
    can come together."""
    default_reward: UnitInterval | None = None
    """Reward of a request that got no feedback in time; None leaves it out of training."""
    late_s_max: NonNegativeFloat = 8 * 86_400.0
    """A session is forgotten so long after its last request: later feedback is left out."""
    num_open_max: PositiveInt = 100_000
    """Requests that are remembered; then the session used longest ago is forgotten. As many signals
    without a request are kept."""
    burst: BurstConfig = BurstConfig()
    revisions_max: PositiveInt = 16
    """Revisions of one sample; later changes of its reward are left out."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.late_s_max < self.reward_wait_s:
            text = f"expected at least reward_wait_s {self.reward_wait_s}, got {self.late_s_max}"
            raise ConfigError(f"feedback.late_s_max: {text}")
        for name, spec in by_name(self.signals).items():
            if spec.maturity_s >= self.late_s_max:
                text = f"expected less than late_s_max {self.late_s_max}, got {spec.maturity_s}"
                raise ConfigError(f"feedback.signals.{name}.maturity_s: {text}")
