"""The distribution that a turn's tokens are drawn from: one arithmetic for sampler and trainer.

    logits ─ bias ─ penalties ─▶ grammar ─ 1/T ─ top-k ─ top-p ─ min-p ─▶ renormalized ─▶ a token
             `shifted`           └──────────── `cut_support` ────────┘

A trainer repeats `shifted` at its own weights, takes the recorded support in place of computing it,
and divides by T: log pi(a | S) = z_a / T - logsumexp over b in S of z_b / T. So the ratio to the
sampler is one of two distributions over the same tokens; a support computed at the trainer's
weights could lack the very token that was drawn. This is how DeepSeek-V3.2 trains what was sampled
with top-p ("Keep Sampling Mask", arXiv 2512.02556, section 3.1). Gradients flow through all of it;
a token outside S gets none, and a token that was the only one allowed gives none.

Every operation is elementwise in float32, so that a row comes out as the same bits in any batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from penstock.messages.task import Sampling


@dataclass(frozen=True, kw_only=True)
class TokenWindow:
    """The tokens that penalties look at.

    Shapes: n positions, V tokens of the vocabulary.
    """

    in_context: torch.Tensor
    """bool [V]: before the turn."""
    counts: torch.Tensor
    """float32 [n, V]: how often the turn has each token before each position."""

    @classmethod
    def of_turn(
        cls, context_ids: torch.Tensor, token_ids: torch.Tensor, vocab_size: int
    ) -> "TokenWindow":
        """Make the windows of all positions of a turn.

        Args:
            context_ids: int64 [P]: all that came before the turn.
            token_ids: int64 [n]: the turn; each position sees those before it.
            vocab_size: V.

        """
        counts = torch.zeros(len(token_ids), vocab_size)
        later = torch.arange(1, len(token_ids))
        counts[later, token_ids[:-1]] = 1.0
        return cls(
            in_context=torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, context_ids, True),
            counts=counts.cumsum_(0),
        )

    def rows(self, at: torch.Tensor, device: torch.device) -> "TokenWindow":
        """Return those of some positions, int64 [m], on a device."""
        return TokenWindow(in_context=self.in_context.to(device), counts=self.counts[at].to(device))


def bias_vector(sampling: Sampling, vocab_size: int) -> torch.Tensor:
    """Return float32 [V]: what `logit_bias` adds."""
    vector = torch.zeros(vocab_size)
    for token_id, value in sampling.logit_bias.items():
        vector[token_id] = value
    return vector


def shifted(logits: torch.Tensor, sampling: Sampling, window: TokenWindow | None) -> torch.Tensor:
    """Return logits [n, V] after bias and penalties; with a gradient.

    Args:
        logits: [n, V] float32.
        sampling: of the turn.
        window: of the same positions; None where `sampling.is_penalized` is not.

    """
    if sampling.logit_bias:
        logits = logits + bias_vector(sampling, logits.shape[-1]).to(logits.device)
    if window is None:
        return logits
    factor = sampling.repetition_penalty
    if factor != 1.0:
        penalized = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(window.in_context | (window.counts > 0), penalized, logits)
    if sampling.frequency_penalty:
        logits = logits - sampling.frequency_penalty * window.counts
    if sampling.presence_penalty:
        logits = logits - sampling.presence_penalty * (window.counts > 0).float()
    return logits


def cut_support(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return bool [V]: the tokens that top-k, top-p and min-p leave of a row; at least one.

    Args:
        logits: [V] float32 after `shifted`, -inf where a grammar allows no token.
        sampling: of the turn; greedy ones cut nothing.

    """
    is_left = logits > -torch.inf
    if sampling.is_greedy:
        return is_left
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        ordered, order = torch.sort(
            logits * (1.0 / sampling.temperature), descending=True, stable=True
        )
        if 0 < sampling.top_k < len(ordered):
            ordered[sampling.top_k :] = -torch.inf
        keeps = ordered > -torch.inf
        if sampling.top_p < 1.0:
            mass = ordered.softmax(-1)
            keeps &= mass.cumsum(-1) - mass < sampling.top_p
        keeps[0] = True
        is_left = torch.zeros_like(is_left).scatter_(0, order, keeps)
    if sampling.min_p > 0.0:
        least = logits.max() + math.log(sampling.min_p) * sampling.temperature
        is_left &= logits >= least
    return is_left


def tempered(logits: torch.Tensor, temperatures: np.ndarray) -> torch.Tensor:
    """Return logits [n, V] divided by each row's temperature, float64 [n] > 0."""
    if (temperatures == 1.0).all():
        return logits
    factors = torch.from_numpy((1.0 / temperatures).astype(np.float32)).to(logits.device)
    return logits * factors.unsqueeze(1)
