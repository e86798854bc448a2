"""The losses by name, and the importance ratio of each. Imports no torch.

Each token is weighted exactly once by the ratio of the current to the behavior policy:

| `ratio_against` | ratio in the loss | ratio in the correction |
|---|---|---|
| None | none | current / behavior |
| proximal | current / proximal | proximal / behavior |
| behavior | current / behavior | none: the loss corrects itself, and `LossConfig` refuses one |

To add a loss, add a line here and its function to `losses.py`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.messages.errors import ConfigError


@dataclass(frozen=True)
class LossSpec:
    """A loss, and the ratio by which it weights tokens."""

    fn: str | Callable[..., Any]
    """Function of `LossTokens` and `LossConfig` that returns `TokenLosses`, or its `module:name`,
    imported on first use."""
    ratio_against: Literal["proximal", "behavior"] | None
    """Policy in the denominator of the loss's own ratio; None if the loss has no ratio."""

    @property
    def corrects_itself(self) -> bool:
        """Whether the loss already contains the whole ratio."""
        return self.ratio_against == "behavior"

    @property
    def function(self) -> Callable[..., Any]:
        """The function, imported if it is named."""
        if not isinstance(self.fn, str):
            return self.fn
        module, _, name = self.fn.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def check_correction(self, name: str, correction: str) -> None:
        """Refuse a correction that would weight tokens twice.

        Raises:
            ConfigError: The loss corrects itself, and a correction is set, too.

        """
        if self.corrects_itself and correction != "none":
            raise ConfigError(
                f"trainer.loss.correction: expected none, since {name}'s own ratio is taken "
                f"against the behavior policy, got {correction!r}"
            )


LOSSES = {
    "policy_gradient": LossSpec(
        "penstock.actors.trainer.objective.losses:policy_gradient", ratio_against=None
    ),
    "ppo_clip": LossSpec(
        "penstock.actors.trainer.objective.losses:ppo_clip", ratio_against="behavior"
    ),
    "cispo": LossSpec("penstock.actors.trainer.objective.losses:cispo", ratio_against="behavior"),
    "gspo": LossSpec("penstock.actors.trainer.objective.losses:gspo", ratio_against="behavior"),
    "decoupled_ppo": LossSpec(
        "penstock.actors.trainer.objective.losses:decoupled_ppo", ratio_against="proximal"
    ),
}
