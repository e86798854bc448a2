"""The distribution from which a turn's tokens are drawn, computed alike in sampler and trainer.

    logits ─ bias ─ penalties ─▶ grammar ─ 1/T ─ top-k ─ top-p ─ min-p ─▶ renormalized ─▶ a token
             `shifted`           └──────────── `cut_support` ────────┘

The trainer repeats `shifted` with its own weights, uses the recorded support S instead of computing
one, and divides by T: log pi(a | S) = z_a / T - logsumexp over b in S of z_b / T. So the ratio to
the sampler compares two distributions over the same tokens; a support computed with the trainer's
weights might not even contain the token that was drawn. DeepSeek-V3.2 trains on top-p samples in
this way ("Keep Sampling Mask", arXiv 2512.02556, section 3.1). Gradients flow through the whole
computation, except to tokens outside S; a position with only one allowed token has no gradient.

Every operation is elementwise in float32, so a row has the same bits in any batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from penstock.messages.task import Sampling


@dataclass(frozen=True, kw_only=True)
class TokenWindow:
    """Token counts for penalties, at n positions of a turn with vocabulary size V."""

    in_context: torch.Tensor
    """Whether each token occurs before the turn, bool [V]."""
    counts: torch.Tensor
    """Occurrences of each token in the turn before each position, float32 [n, V]."""

    @classmethod
    def of_turn(
        cls, context_ids: torch.Tensor, token_ids: torch.Tensor, vocab_size: int
    ) -> "TokenWindow":
        """Return the counts at all positions of a turn.

        Args:
            context_ids: All ids before the turn, int64 [P].
            token_ids: Ids of the turn, int64 [n].
            vocab_size: Vocabulary size, V.

        """
        counts = torch.zeros(len(token_ids), vocab_size)
        later = torch.arange(1, len(token_ids))
        counts[later, token_ids[:-1]] = 1.0
        return cls(
            in_context=torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, context_ids, True),
            counts=counts.cumsum_(0),
        )

    def rows(self, at: torch.Tensor, device: torch.device) -> "TokenWindow":
        """Return the counts at positions `at`, int64 [m], on a device."""
        return TokenWindow(in_context=self.in_context.to(device), counts=self.counts[at].to(device))


def bias_vector(sampling: Sampling, vocab_size: int) -> torch.Tensor:
    """Return the vector that `logit_bias` adds to the logits, float32 [V]."""
    vector = torch.zeros(vocab_size)
    for token_id, value in sampling.logit_bias.items():
        vector[token_id] = value
    return vector


def shifted(logits: torch.Tensor, sampling: Sampling, window: TokenWindow | None) -> torch.Tensor:
    """Return logits [n, V] after bias and penalties; differentiable.

    Args:
        logits: Logits at n positions, float32 [n, V].
        sampling: Settings of the turn.
        window: Token counts at the same positions; None unless `sampling.is_penalized`.

    """
    if sampling.logit_bias:
        logits = logits + bias_vector(sampling, logits.shape[-1]).to(logits.device)
    if window is None:
        return logits
    factor = sampling.repetition_penalty
    if factor != 1.0:
        # Positive logits are divided and negative ones multiplied: both become less likely.
        penalized = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(window.in_context | (window.counts > 0), penalized, logits)
    if sampling.frequency_penalty:
        logits = logits - sampling.frequency_penalty * window.counts
    if sampling.presence_penalty:
        logits = logits - sampling.presence_penalty * (window.counts > 0).float()
    return logits


def cut_support(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the tokens that remain after top-k, top-p and min-p, as bool [V]; at least one.

    Args:
        logits: Logits after `shifted`, float32 [V]; -inf for tokens that a grammar forbids.
        sampling: Settings of the turn; greedy settings remove nothing.

    """
    is_left = logits > -torch.inf
    if sampling.is_greedy:
        return is_left
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        # Stable: ties are broken by token id, so that the support does not depend on the sort.
        ordered, order = torch.sort(
            logits * (1.0 / sampling.temperature), descending=True, stable=True
        )
        if 0 < sampling.top_k < len(ordered):
            ordered[sampling.top_k :] = -torch.inf
        keeps = ordered > -torch.inf
        if sampling.top_p < 1.0:
            # A token stays if the mass before it is below top_p, so the one that crosses it stays.
            mass = ordered.softmax(-1)
            keeps &= mass.cumsum(-1) - mass < sampling.top_p
        # At least one token must remain, however small top_p is.
        keeps[0] = True
        is_left = torch.zeros_like(is_left).scatter_(0, order, keeps)
    if sampling.min_p > 0.0:
        # p >= min_p * p_max, written in logits, which needs no softmax.
        least = logits.max() + math.log(sampling.min_p) * sampling.temperature
        is_left &= logits >= least
    return is_left


def tempered(logits: torch.Tensor, temperatures: np.ndarray) -> torch.Tensor:
    """Return logits [n, V] divided by the temperature of each row, float64 [n] > 0."""
    if (temperatures == 1.0).all():
        return logits
    # Multiply by the rounded reciprocal, as the sampler does: the bits must agree.
    factors = torch.from_numpy((1.0 / temperatures).astype(np.float32)).to(logits.device)
    return logits * factors.unsqueeze(1)
