"""The SDK's losses: sums over tokens, with the names and defaults of its documentation.

Each takes the logprobs of the targets now and the inputs of the request, and returns a loss per
target. `stable_reinforce`, `gspo` and `custom` are not here: they are refused by name.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

Inputs = Mapping[str, torch.Tensor]
_LOG_RATIO_MAX = 20.0
"""Bounds exp(), as in the losses of runs."""


class Loss(NamedTuple):
    """One loss."""

    function: Callable[[torch.Tensor, Inputs, Mapping[str, float]], torch.Tensor]
    """Logprobs [N], inputs [N] by name and settings to losses [N]."""
    inputs: tuple[str, ...]
    """Besides `target_tokens`."""
    settings: Mapping[str, float]
    """Their defaults."""


def _ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return (logprobs - inputs["logprobs"]).clamp(-_LOG_RATIO_MAX, _LOG_RATIO_MAX).exp()


def _cross_entropy(
    logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]
) -> torch.Tensor:
    return -logprobs * inputs["weights"]


def _importance_sampling(
    logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]
) -> torch.Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _ppo(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    ratio = _ratio(logprobs, inputs).detach()
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -clipped * logprobs * inputs["advantages"]


def _dro(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    square = (logprobs - inputs["logprobs"]).square()
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * square)


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, ("weights",), {}),
    "importance_sampling": Loss(_importance_sampling, _POLICY, {}),
    "ppo": Loss(_ppo, _POLICY, _CLIP),
    "cispo": Loss(_cispo, _POLICY, _CLIP),
    "dro": Loss(_dro, _POLICY, {"beta": 0.05}),
}


def flat_inputs(name: str, data: Mapping[str, np.ndarray]) -> Inputs:
    """Return the loss inputs of one sequence, float32 [N]."""
    return {
        key: torch.as_tensor(data[key].astype(np.float32).reshape(-1))
        for key in LOSSES[name].inputs
    }
