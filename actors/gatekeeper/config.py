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
    """How far the candidate may be from stable, and how much has to be known."""

    bound: PositiveFloat
    num_min: PositiveInt = 200
    """Users per arm; of `discard_rate` samples, of `kl` and `ess` tokens."""


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
"""Defaults. `reply_length`: doublings, up or down. `edit_rate`: points fewer. `unrated`: points of
sessions that nobody judged, more. `tool_mix`: total variation. `kl`: nats per token; `ess`: the
least share of the batch. The others: points more."""


class OfflineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paired evaluation of candidate and stable on the same held-out tasks."""

    num_tasks: NonNegativeInt = 64
    """0: none, for a service without tasks."""
    margin: UnitInterval = 0.02
    """The candidate may solve this share of the tasks less, ..."""
    alpha: PositiveFloat = 0.05
    """... and McNemar's exact test that it is worse must not reject at this level."""
    num_pairs_min: PositiveInt = 16
    """Tasks that both versions were judged on."""


class LiveTestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sequential test over users."""

    share: Share = 0.5
    """Of the users, for the candidate."""
    alpha: PositiveFloat = 0.05
    """Probability of a false decision, promotion or rollback, however long one looks: half each."""
    margin: UnitInterval = 0.0
    """The candidate is promoted once it is shown not to be worse by more than this; 0: better."""
    sticky_s: PositiveFloat = 7 * 86400.0
    """How long a user stays in one arm."""
    sessions_per_user: PositiveInt = 3
    """Rated sessions whose mean is a user's reward, once in each such period."""
    replies_per_user: PositiveInt = 8
    """Replies of a user by which guards may be shown to be broken, likewise."""
    user_window_s: PositiveFloat = 86400.0
    """What counts of a user is within this time of their first reply; sessions that nobody has
    rated by then are unrated."""
    users_max: PositiveInt = 200_000
    """Users of one experiment; further ones are served and not counted."""
    tenant_share_max: UnitInterval = 0.3
    """A tenant's share of the users that are counted; with few tenants 1.5 equal shares."""
    effect: PositiveFloat = 0.016
    """Difference in reward whose number of sessions is reported: 2.28% of a keep rate of 70%."""


class GatekeeperConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a version has to show before all users are served by it."""

    quality_bar: UnitInterval = 0.25
    """Held-out pass rate of the newest evaluation before live training began; 0: none."""
    offline: OfflineConfig = OfflineConfig()
    test: LiveTestConfig = LiveTestConfig()
    guards: dict[str, GuardConfig] = {}
    """By name, in place of the defaults."""
    guard_alpha: PositiveFloat = 0.001
    """Level at which a guard is shown to be broken, however long one looks: that is a rollback."""
    edit_tools: tuple[str, ...] = (
        "write", "write_file", "edit", "edit_file", "replace", "str_replace", "insert",
        "apply_patch", "patch", "delete", "str_replace_editor", "str_replace_based_edit_tool",
        "Write", "Edit", "MultiEdit", "NotebookEdit",
    )  # fmt: skip
    """Names of tools that change files."""
    prepare_s_max: PositiveFloat = 86400.0
    """Longest time until a candidate's experiment starts; then the next one has its turn."""
    hold_s_max: NonNegativeFloat = 14 * 86400.0
    """Longest experiment; then the candidate leaves as it came."""

    def __post_init__(self) -> None:
        """Check the names of the guards.

        Raises:
            ConfigError: There is no such guard.

        """
        for name in self.guards:
            if name not in GUARDS:
                expected = ", ".join(GUARDS)
                raise ConfigError(f"gatekeeper.guards: expected {expected}, got {name!r}")

    def guard(self, name: str) -> GuardConfig:
        """Return the settings of one guard."""
        return self.guards.get(name, GUARDS[name])
