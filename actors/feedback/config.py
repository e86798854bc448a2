"""Settings of the feedback join."""

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval
from penstock.messages.signals.declaration import SignalSpec, by_name
from penstock.messages.signals.defaults import DEFAULT_SIGNALS


class BurstConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a user's feedback is held as a burst."""

    window_s: PositiveFloat = 600.0
    """Length of a counting window in seconds."""
    num_min: PositiveInt = 120
    """Signals per window that a burst must exceed."""
    ratio: PositiveFloat = 4.0
    """Multiple of the user's earlier maximum per window that a burst must exceed."""


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How feedback becomes a reward."""

    signals: tuple[SignalSpec, ...] = DEFAULT_SIGNALS
    """Declared signals; a table in the configuration replaces the defaults."""
    reward_wait_s: NonNegativeFloat = 5.0
    """Minimum seconds from a session's last request to its join, so that further turns and signals
    enter together."""
    default_reward: UnitInterval | None = None
    """Reward of a request without feedback; None leaves it out of training."""
    late_s_max: NonNegativeFloat = 8 * 86_400.0
    """Seconds after its last request until a session is forgotten; later feedback is left out."""
    num_open_max: PositiveInt = 100_000
    """Maximum requests remembered; beyond it the least recently used session is forgotten. Also the
    maximum of signals without a request."""
    burst: BurstConfig = BurstConfig()
    revisions_max: PositiveInt = 16
    """Maximum revisions of one sample; later changes of its reward are left out."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.late_s_max < self.reward_wait_s:
            text = f"expected at least reward_wait_s {self.reward_wait_s}, got {self.late_s_max}"
            raise ConfigError(f"feedback.late_s_max: {text}")
        for name, spec in by_name(self.signals).items():
            # Such a signal would mature only after its session is forgotten.
            if spec.maturity_s >= self.late_s_max:
                text = f"expected less than late_s_max {self.late_s_max}, got {spec.maturity_s}"
                raise ConfigError(f"feedback.signals.{name}.maturity_s: {text}")
