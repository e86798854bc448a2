"""How exactly trainer and sampler compute alike. Imports no torch.

    off     what a plain trainer does: experts routed anew, scores in bfloat16
    fast    recorded routes replayed, scores in float32, sums in an order fixed by the batch
    exact   the sampler's own arithmetic: equal logprobs, to the bit (`exact.py`)

docs/numerics.md has the price of each, and what it removes.
"""

import msgspec

from penstock.messages.errors import ConfigError, PenstockError

MODES = ("off", "fast", "exact")


class ExactModeError(PenstockError, RuntimeError):
    """Exact mode was asked for where the sampler's arithmetic is not to be had."""


class NumericsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The remedies against mismatch."""

    mode: str = "fast"
    plausible: float = 0.0
    """A replayed expert whose probability here is lower gives way to the router's own best; 0 keeps
    them all (Composer 2, arXiv 2603.24477)."""

    def __post_init__(self) -> None:
        """Refuse unknown names and impossible values."""
        if self.mode not in MODES:
            choices = ", ".join(MODES)
            raise ConfigError(f"policy.numerics.mode: expected one of {choices}, got {self.mode!r}")
        if not 0.0 <= self.plausible < 1.0:
            raise ConfigError(
                f"policy.numerics.plausible: expected 0 to 1, without 1, got {self.plausible}"
            )

    @property
    def replays(self) -> bool:
        """Whether recorded routes are used."""
        return self.mode != "off"

    @property
    def has_exact_gate(self) -> bool:
        """Whether the experts' scores are computed in float32."""
        return self.mode != "off"

    @property
    def is_exact(self) -> bool:
        """Whether the trainer computes with the sampler's own arithmetic."""
        return self.mode == "exact"
