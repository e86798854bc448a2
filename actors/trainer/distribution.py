"""The distribution from which each turn was sampled, recomputed from the trainer's logits.

A turn whose distribution cannot be recomputed raises a typed error and is never trained: its
settings are missing, unsupported by this trainer, or truncated the vocabulary without recording
which tokens were left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.actors.policy.settings import fault_of
from penstock.actors.policy.shaping import TokenWindow, shifted
from penstock.kernels.arrays import from_array
from penstock.kernels.support import open_support, unpack_support
from penstock.messages.errors import ErasedError, PenstockError
from penstock.messages.reward import Outcome
from penstock.messages.rollout import Turn, VersionSpan
from penstock.messages.task import Sampling


class NotReproducibleError(PenstockError, ValueError):
    """The distribution from which a turn was sampled cannot be recomputed."""


class GreedyTurnError(PenstockError, ValueError):
    """A turn was sampled at temperature 0, so there is no policy gradient."""


def outcome_of(error: ValueError) -> Outcome:
    """Return the outcome of a sample that cannot be trained because of an error."""
    match error:
        case NotReproducibleError():
            return Outcome.NOT_REPRODUCIBLE
        case GreedyTurnError():
            return Outcome.GREEDY
        case ErasedError():
            return Outcome.ERASED
    return Outcome.INFRASTRUCTURE_ERROR


@dataclass(frozen=True, kw_only=True)
class TurnDraw:
    """How the n trained tokens of one turn were sampled, from a vocabulary of V tokens."""

    sampling: Sampling
    start: int
    """Position of the turn's first sampled token in its sequence."""
    at: np.ndarray
    """[n] int64: positions of trained tokens from `start`, without forced and withheld ones."""
    support: np.ndarray | None = None
    """uint8 [n, row_bytes(V)]: bit mask of tokens that could be sampled; None for all tokens."""

    @property
    def is_plain(self) -> bool:
        """Whether only a temperature shaped the distribution."""
        penalized = self.sampling.is_penalized or bool(self.sampling.logit_bias)
        return self.support is None and not penalized

    def since(self, policy_version: int, spans: Sequence[VersionSpan]) -> "TurnDraw":
        """Return the draw of the tokens that this version or a newer one sampled.

        Args:
            policy_version: Oldest version whose tokens are trained; 0 keeps all.
            spans: Version spans of all tokens of the turn.

        """
        if not policy_version:
            return self
        # One span per version: a swap in the middle of a turn begins another one.
        versions = np.repeat(
            [span.policy_version for span in spans], [span.num_tokens for span in spans]
        )
        kept = versions[self.at] >= policy_version
        support = None if self.support is None else self.support[kept]
        return replace(self, at=self.at[kept], support=support)


def draw_of(turn: Turn, start: int, vocab_size: int) -> TurnDraw:
    """Return how a turn was sampled whose sampled tokens begin at `start` of its sequence.

    Raises:
        NotReproducibleError, GreedyTurnError: The turn cannot be trained.
        ValueError: Spans or supports are malformed.

    """
    sampling, token_ids = turn.sampling, from_array(turn.token_ids)
    if sampling is None:
        raise NotReproducibleError("sampling: nobody recorded what shaped the distribution")
    if sampling.is_greedy:
        raise GreedyTurnError("sampling.temperature: 0, nothing was explored")
    if fault := fault_of(sampling, vocab_size):
        raise NotReproducibleError(f"sampling.{fault}")
    is_context = _is_forced(turn, token_ids.size) | turn.is_withheld
    at = np.flatnonzero(~is_context)
    support = None
    if sampling.is_truncated:
        if not turn.support:
            raise NotReproducibleError("support: the settings leave tokens out, and it is missing")
        support = open_support(turn.support, token_ids.size, vocab_size)[at]
        chosen = token_ids[at]
        # A sampled token outside of its support would have probability 0, and an infinite loss.
        if not (support[np.arange(at.size), chosen // 8] >> (chosen % 8) & 1).all():
            raise ValueError("support: expected every sampled token in it")
    return TurnDraw(sampling=sampling, start=start, at=at, support=support)


def temperatures_of(draws: Sequence[TurnDraw]) -> np.ndarray:
    """Return float64 [N], the temperature of each trained token."""
    counts = [draw.at.size for draw in draws]
    return np.repeat([draw.sampling.temperature for draw in draws], counts)


def shaped(logits: torch.Tensor, draws: Sequence[tuple[np.ndarray, TurnDraw]]) -> torch.Tensor:
    """Return logits [N, V] as the sampler shaped them, except for the temperature; differentiable.

    Args:
        logits: Logits of the trained tokens of all draws, in their order.
        draws: (token ids [T] of the sequence, draw) of each turn.

    """
    if all(draw.is_plain for _, draw in draws):
        return logits
    counts = [draw.at.size for _, draw in draws]
    parts = [
        part if draw.is_plain else _shaped_turn(part, token_ids, draw)
        for part, (token_ids, draw) in zip(logits.split(counts), draws, strict=True)
    ]
    return torch.cat(parts)


def _shaped_turn(logits: torch.Tensor, token_ids: np.ndarray, draw: TurnDraw) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    window = None
    if draw.sampling.is_penalized:
        context, turn = token_ids[: draw.start], token_ids[draw.start :]
        # Penalties depend on all tokens before each one, whether trained or not.
        longest = int(draw.at[-1]) + 1 if draw.at.size else 0
        every = TokenWindow.of_turn(
            torch.from_numpy(context), torch.from_numpy(turn[:longest]), vocab_size
        )
        window = every.rows(torch.from_numpy(draw.at), logits.device)
    logits = shifted(logits, draw.sampling, window)
    if draw.support is None:
        return logits
    is_left = torch.from_numpy(unpack_support(draw.support, vocab_size))
    return logits.masked_fill(~is_left.to(logits.device), -torch.inf)


def _is_forced(turn: Turn, num_tokens: int) -> np.ndarray:
    forced = np.zeros(num_tokens, bool)
    end_before = 0
    for start, end in turn.forced:
        if not end_before <= start < end <= num_tokens:
            raise ValueError(f"forced: expected ascending spans within {num_tokens} tokens")
        forced[start:end] = True
        end_before = end
    return forced
