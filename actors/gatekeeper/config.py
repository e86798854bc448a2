"""Settings of the gatekeeper."""

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.gates import Share
from penstock.messages.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one guard."""

    bound: PositiveFloat
    """Largest difference from stable that passes, in the guard's unit (see `GUARDS`)."""
    num_min: PositiveInt = 200
    """Smallest number of users per arm; for `discard_rate` samples, for `kl` and `ess` tokens."""


GUARDS: dict[str, GuardConfig] = {
    "reply_length": GuardConfig(bound=1.0),
    "empty_replies": GuardConfig(bound=0.02),
    "invalid_calls": GuardConfig(bound=0.03),
    "question_rate": GuardConfig(bound=0.05),
    "edit_rate": GuardConfig(bound=0.05),
    "unrated": GuardConfig(bound=0.1),
    "tool_mix": GuardConfig(bound=0.2),
    "discard_rate": GuardConfig(bound=0.1, num_min=50),
    "kl": GuardConfig(bound=0.05, num_min=1000),
    "ess": GuardConfig(bound=0.5, num_min=1000),
}
"""Default guards. Units of the bounds: `reply_length`: doublings, up or down; `edit_rate`: decrease
of the rate; `unrated`: increase of the share of sessions without a rating; `tool_mix`: total
variation distance; `kl`: nats per token; `ess`: smallest effective sample size as a share of the
batch; all others: increase of the rate (0.02 is two percentage points)."""


class OfflineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the paired evaluation of candidate and stable on the same held-out tasks."""

    num_tasks: NonNegativeInt = 64
    """Number of held-out tasks; 0 turns the gate off, for a service without tasks."""
    margin: UnitInterval = 0.02
    """Largest decrease of the candidate's pass rate that passes."""
    alpha: PositiveFloat = 0.05
    """Level of McNemar's exact one-sided test; a p-value below it rejects the candidate."""
    num_pairs_min: PositiveInt = 16
    """Smallest number of tasks on which both versions have a verdict."""


class LiveTestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the sequential test over users."""

    share: Share = 0.5
    """Share of users that the candidate serves."""
    alpha: PositiveFloat = 0.05
    """Probability of a false decision at any time, half for promotion and half for rollback."""
    margin: UnitInterval = 0.0
    """Largest decrease in reward that still allows promotion; 0: the candidate must be better."""
    sticky_s: PositiveFloat = 7 * 86400.0
    """Seconds for which a user stays in one arm."""
    sessions_per_user: PositiveInt = 3
    """Rated sessions whose mean is a user's reward; counted once per `sticky_s`."""
    replies_per_user: PositiveInt = 8
    """First replies of a user that the guards' tests use; counted once per `sticky_s`."""
    user_window_s: PositiveFloat = 86400.0
    """Seconds after a user's first reply in which replies and ratings count; a session without a
    rating by then is unrated."""
    users_max: PositiveInt = 200_000
    """Largest number of users counted in one experiment; further users are served normally."""
    tenant_share_max: UnitInterval = 0.3
    """Largest share of one tenant among the counted users; with few tenants 1.5 equal shares."""
    effect: PositiveFloat = 0.016
    """Difference in reward for which the number of missing sessions is reported; the default is
    2.28% of a keep rate of 70%."""


class GatekeeperConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the gates that a version must pass before all users are served by it."""

    quality_bar: UnitInterval = 0.25
    """Smallest held-out pass rate in the newest evaluation before live training; 0: no bar."""
    offline: OfflineConfig = OfflineConfig()
    test: LiveTestConfig = LiveTestConfig()
    guards: dict[str, GuardConfig] = {}
    """Guard settings by name, in place of the defaults."""
    guard_alpha: PositiveFloat = 0.001
    """Level of each guard's sequential test, valid at any time; a rejection rolls back."""
    edit_tools: tuple[str, ...] = (
        "write", "write_file", "edit", "edit_file", "replace", "str_replace", "insert",
        "apply_patch", "patch", "delete", "str_replace_editor", "str_replace_based_edit_tool",
        "Write", "Edit", "MultiEdit", "NotebookEdit",
    )  # fmt: skip
    """Names of tools that change files."""
    prepare_s_max: PositiveFloat = 86400.0
    """Longest wait for a candidate's experiment to start, in seconds; it expires after that."""
    hold_s_max: NonNegativeFloat = 14 * 86400.0
    """Longest experiment in seconds; an undecided candidate expires after that."""

    def __post_init__(self) -> None:
        """Check the names of the guards.

        Raises:
            ConfigError: A guard's name is unknown.

        """
        for name in self.guards:
            if name not in GUARDS:
                expected = ", ".join(GUARDS)
                raise ConfigError(f"gatekeeper.guards: expected {expected}, got {name!r}")

    def guard(self, name: str) -> GuardConfig:
        """Return the settings of one guard, configured or default."""
        return self.guards.get(name, GUARDS[name])
