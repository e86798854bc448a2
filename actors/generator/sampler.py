"""Drawing tokens: one uniform number per token, from the request's own stream.

Inverse-CDF sampling uses up exactly one number per token, so a request's draws depend on its seed
and its logits only, never on who shares the batch. Whatever the values of a request and its logits
are, a token is one of the vocabulary, and has a probability: `SamplingBatch` keeps values where
float32 can work with them, and who calls sets rows aside that are no numbers (`finite_rows`). Rows
come shaped (`shaper.py`): -inf is a token that cannot be drawn.
"""

from dataclasses import dataclass

import numpy as np
import torch

from penstock.actors.policy.settings import TEMPERATURE_MAX
from penstock.messages.task import TEMPERATURE_MIN, Sampling


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling values of B rows, within the bounds that float32 can work with."""

    temperatures: list[float]
    """0, or from `TEMPERATURE_MIN` to `TEMPERATURE_MAX`."""
    uniforms: list[float]
    """In [0, 1)."""

    def __post_init__(self) -> None:
        """Clamp; what is no number becomes the upper bound."""
        temperatures = [
            max(TEMPERATURE_MIN, min(TEMPERATURE_MAX, t)) if not t <= 0.0 else 0.0
            for t in self.temperatures
        ]
        object.__setattr__(self, "temperatures", temperatures)


def finite_rows(logits: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return bool [M]: which rows of float32 [M, V] hold nothing but numbers."""
    values = logits.numpy() if isinstance(logits, torch.Tensor) else logits
    with np.errstate(over="ignore", invalid="ignore"):
        return np.isfinite(values.sum(axis=1))


def uniforms_for(sampling: Sampling, num_resumed: int = 0) -> list[float]:
    """Return the request's stream: one number for each token it may draw.

    A turn that was begun elsewhere continues behind the numbers that its first tokens used up.
    """
    stream = np.random.Generator(np.random.Philox(key=sampling.seed % 2**128))
    return stream.random(num_resumed + sampling.num_tokens_max)[num_resumed:].tolist()


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[list[int], list[float]]:
    """Draw one token per row.

    Args:
        logits: [B, V] float32; overwritten.
        batch: B values each.

    Returns:
        Token ids, and their log-probabilities under the distribution drawn from.

    """
    greedy = min(batch.temperatures) <= 0.0
    if any(temperature != 1.0 for temperature in batch.temperatures):
        scale = torch.tensor([1.0 / t if t > 0 else 1.0 for t in batch.temperatures])
        logits.mul_(scale.unsqueeze(1))
    logprobs = torch.log_softmax(logits, dim=-1)
    cdf = logprobs.exp().cumsum_(-1)
    targets = torch.tensor(batch.uniforms, dtype=torch.float32).unsqueeze(1) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, targets, right=True)
    if greedy:
        is_greedy = torch.tensor([t <= 0.0 for t in batch.temperatures]).unsqueeze(1)
        tokens = torch.where(is_greedy, logprobs.argmax(-1, keepdim=True), tokens)
    tokens = _within_support(tokens, cdf)
    return tokens.squeeze(1).tolist(), logprobs.gather(1, tokens).squeeze(1).tolist()


def _within_support(tokens: torch.Tensor, cdf: torch.Tensor) -> torch.Tensor:
    """Move draws that rounding put past the CDF's end to the last token that has mass."""
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous(), right=False)
    return torch.minimum(tokens, last).clamp_(max=cdf.shape[1] - 1)
