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
    """DPO and KTO: the losses, the phase before RL, and users' corrections and judgments."""

    beta: PositiveFloat = 0.1
    """How far the policy is held to the reference, version 0 (before RL: what the phase starts
    from): a smaller one lets it go further."""
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    """Of DPO: the share of pairs that are taken to be the wrong way round."""
    desirable_weight: NonNegativeFloat = 1.0
    """Of KTO, like the next."""
    undesirable_weight: NonNegativeFloat = 1.0
    num_epochs: PositiveInt = 1
    """Of the phase before RL, like the fields down to `grad_clip`."""
    batch_examples: PositiveInt = 16
    """Pairs and labels of one optimizer step; KTO's KL term needs at least two labels."""
    learning_rate: NonNegativeFloat = 1e-5
    warmup_fraction: UnitInterval = 0.1
    """Later the rate falls in a straight line to a tenth."""
    grad_clip: PositiveFloat = 1.0
    report_steps: PositiveInt = 10
    live_weight: NonNegativeFloat = 0.0
    """Of users' corrections and judgments in a step: the mean of their losses times this is added
    to the step's loss. 0: they are not trained."""
    num_live_max: PositiveInt = 16
    """Maximum of them in one step; others wait for the next."""
