"""Settings of training on preferences. Imports no torch."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.messages.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)


class PreferencesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DPO and KTO: losses, the phase before RL, and live corrections and judgments."""

    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference: version 0, or in the phase before RL its start."""
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    """DPO: share of pairs assumed to have the wrong order."""
    desirable_weight: NonNegativeFloat = 1.0
    """KTO: weight of desirable replies."""
    undesirable_weight: NonNegativeFloat = 1.0
    """KTO: weight of undesirable replies."""
    num_epochs: PositiveInt = 1
    """Epochs of the phase before RL, to which the fields down to `report_steps` belong."""
    batch_examples: PositiveInt = 16
    """Pairs and labels per optimizer step; KTO's KL term needs at least two labels."""
    learning_rate: NonNegativeFloat = 1e-5
    warmup_fraction: UnitInterval = 0.1
    """Share of the steps that warm up; afterwards the rate decays linearly to a tenth."""
    grad_clip: PositiveFloat = 1.0
    report_steps: PositiveInt = 10
    live_weight: NonNegativeFloat = 0.0
    """Weight of the mean loss of live corrections and judgments in a step's loss; 0 trains none."""
    num_live_max: PositiveInt = 16
    """Maximum live corrections and judgments per step; others wait."""
