"""The losses by name, and the importance ratio that each of them takes. Imports no torch.

Each token is weighted by the ratio of the current policy to the behavior policy, once:

| `ratio_against` | the loss's own ratio | what a correction weights by |
|---|---|---|
| None | none | current / behavior |
| proximal | current / proximal | proximal / behavior |
| behavior | current / behavior | nothing: the loss corrects itself, and `LossConfig` refuses one |

To add one: a line here, and its function in `losses.py`.
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
    which is imported when it is first used."""
    ratio_against: Literal["proximal", "behavior"] | None
    """Policy in the denominator of the loss's own ratio; None: tokens have no other weight than the
    correction's."""

    @property
    def corrects_itself(self) -> bool:
        """Whether the loss already weights tokens of the behavior policy by the whole ratio."""
        return self.ratio_against == "behavior"

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        if not isinstance(self.fn, str):
            return self.fn
        module, _, name = self.fn.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def check_correction(self, name: str, correction: str) -> None:
        """Refuse to weight a token twice.

        Raises:
            ConfigError: The loss corrects itself, and a correction is set beside it.

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
