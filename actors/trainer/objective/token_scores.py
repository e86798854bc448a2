"""Log-probabilities and entropies of drawn tokens, from hidden states.

For N tokens and a vocabulary of V, the logits are N x V numbers, and a backward pass has several
such tables: for a long sequence and a real vocabulary, they take more memory than the model. They
are therefore computed in chunks of rows, and again in the backward pass, with one chunk in memory
at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.actors.policy.shaping import tempered
from penstock.actors.trainer.distribution import TurnDraw, shaped, temperatures_of
from penstock.actors.trainer.objective.kl import entropies

Draws = Sequence[tuple[np.ndarray, TurnDraw]]
"""The sequence [T] that each drawn turn is of, and how it was drawn."""
Entropy = Literal["none", "value", "gradient"]
"""Whether entropies are computed, and whether a loss uses them."""


class TokenScores(NamedTuple):
    """Scores of N tokens, on the policy's device."""

    logprobs: torch.Tensor
    """float32 [N]."""
    entropies: torch.Tensor
    """float32 [N], of the distributions that they were drawn from; [0] if not asked for."""


def token_scores(
    policy: Policy,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    draws: Draws | None = None,
    entropy: Entropy = "none",
) -> TokenScores:
    """Return the scores of N tokens, with at most `policy.num_logits_max` logits at once.

    Args:
        policy: Policy, between the forward pass that gave `hidden` and the next one.
        hidden: [N, d].
        targets: Tokens, int64 [N].
        draws: How the N tokens were drawn; None for the plain distribution.
        entropy: Which entropies are needed.

    """
    num_rows = max(1, policy.num_logits_max // policy.config.vocab_size)
    starts = range(0, max(1, hidden.shape[0]), num_rows)
    drawn = [None if draws is None else drawn_rows(draws, i, i + num_rows) for i in starts]
    parts = targets.split(num_rows) if len(starts) > 1 else (targets,)

    def scores(part: int, rows: torch.Tensor, wanted: Entropy) -> TokenScores:
        logits, draws = policy.logits(rows).float(), drawn[part]
        if draws is not None:
            logits = tempered(shaped(logits, draws), temperatures_of([draw for _, draw in draws]))
        found = token_logprobs(logits, parts[part])
        if wanted == "none":
            return TokenScores(found, found.new_zeros(0))
        # The graph of an entropy that no loss uses would keep the logits until the backward pass.
        return TokenScores(found, entropies(logits if wanted == "gradient" else logits.detach()))

    if len(starts) == 1:
        return scores(0, hidden, entropy)
    if not torch.is_grad_enabled():
        return _joined([scores(i, rows, entropy) for i, rows in enumerate(hidden.split(num_rows))])
    return TokenScores(
        *_ChunkedScores.apply(scores, num_rows, entropy, hidden, *policy.head_weights())
    )


def drawn_rows(draws: Draws, start: int, stop: int) -> Draws:
    """Return how tokens `start` to `stop` were drawn."""
    found: list[tuple[np.ndarray, TurnDraw]] = []
    offset = 0
    for token_ids, draw in draws:
        rows = slice(max(start - offset, 0), min(stop - offset, draw.at.size))
        if rows.start < rows.stop:
            support = None if draw.support is None else draw.support[rows]
            found.append((token_ids, replace(draw, at=draw.at[rows], support=support)))
        offset += draw.at.size
    return found


def _joined(found: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(*(torch.cat(each) for each in zip(*found, strict=True)))


class _ChunkedScores(torch.autograd.Function):
    """Computes scores chunk by chunk; the backward pass recomputes each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Callable[[int, torch.Tensor, Entropy], TokenScores],
        num_rows: int,
        entropy: Entropy,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> TokenScores:
        ctx.scores, ctx.num_rows, ctx.weights = scores, num_rows, weights
        ctx.wanted = "gradient" if entropy == "gradient" else "none"
        ctx.save_for_backward(hidden)
        parts = enumerate(hidden.split(num_rows))
        found = _joined([scores(i, rows, entropy) for i, rows in parts])
        if entropy != "gradient":
            ctx.mark_non_differentiable(found.entropies)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        num_wanted = 2 if ctx.wanted == "gradient" else 1
        found_rows: list[torch.Tensor] = []
        totals: list[torch.Tensor] = []
        for part, rows in enumerate(hidden.split(ctx.num_rows)):
            inputs = rows.detach().requires_grad_()
            with torch.enable_grad():
                found = ctx.scores(part, inputs, ctx.wanted)
            given = [each.split(ctx.num_rows)[part] for each in grad_outputs[:num_wanted]]
            found_row, *of_weights = torch.autograd.grad(
                found[:num_wanted], [inputs, *ctx.weights], given
            )
            found_rows.append(found_row)
            # In float32: a bfloat16 sum over many chunks would lose most of what they add.
            own = [each.float() for each in of_weights]
            totals = [a.add_(b) for a, b in zip(totals, own, strict=True)] if totals else own
        weights = [total.to(w.dtype) for total, w in zip(totals, ctx.weights, strict=True)]
        return None, None, None, torch.cat(found_rows), *weights
