"""Slow environments for measurements: machines that sleep, which takes no processor."""

import math
import random
from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat, PositiveFloat

_AROUND_MEAN = (0.6, 1.4)
"""Calls of one task take between these times its mean."""


class SlowCalls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long machines sleep before each call of a tool: a moment in most tasks, long in some."""

    median_s: PositiveFloat = 1.0
    """Of the tasks' means."""
    spread: NonNegativeFloat = 1.0
    """Standard deviation of the logarithm of the tasks' means."""
    s_min: PositiveFloat = 0.5
    s_max: Annotated[float, msgspec.Meta(gt=0, le=60)] = 6.0

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.s_min > self.s_max:
            expected = f"expected at most s_max {self.s_max:g}"
            raise ConfigError(f"prepare.slow_calls.s_min: {expected}, got {self.s_min:g}")

    def draw(self, dice: random.Random) -> tuple[float, float]:
        """Return between which seconds a task's machines sleep."""
        mean_s = self.median_s * math.exp(dice.gauss(0.0, self.spread))
        low, high = (mean_s * factor for factor in _AROUND_MEAN)
        return min(max(low, self.s_min), self.s_max), max(min(high, self.s_max), self.s_min)
