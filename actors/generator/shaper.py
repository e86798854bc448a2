"""Shapes the logits of requests that ask for more than a temperature.

    row of logits ──shifted──▶ grammar's mask ──cut_support──▶ -inf where no token can be drawn
                                                       └──▶ the support, recorded with the token

Most requests have no shaper: nothing is done for them, and their arithmetic is as without this.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from penstock.actors.generator.masks import TurnGrammar
from penstock.actors.policy.shaping import TokenWindow, cut_support, shifted
from penstock.kernels.support import pack_support, unpack_support
from penstock.messages.task import Sampling


class Shaped(NamedTuple):
    """What could be drawn at one position."""

    support: np.ndarray | None
    """uint8 [row_bytes(V)]; None where all tokens could."""
    is_forced: bool
    """Whether the grammar allowed one token alone."""


class TurnShaper:
    """Follows one request's tokens."""

    def __init__(self, sampling: Sampling, grammar: TurnGrammar | None) -> None:
        """Start at the turn's first token; `grammar` is of what follows the forced tokens."""
        self._sampling = sampling
        self._grammar = grammar
        self._forced = deque(sampling.grammar.prefix_ids if sampling.grammar else ())
        self._window: TokenWindow | None = None

    @classmethod
    def of(cls, sampling: Sampling, grammar: TurnGrammar | None) -> "TurnShaper | None":
        """Return None where there is nothing to shape."""
        shapes = sampling.is_truncated or sampling.is_penalized or sampling.logit_bias
        return cls(sampling, grammar) if shapes else None

    def begin(self, context: np.ndarray, vocab_size: int, num_resumed: int) -> None:
        """See the context, whose last `num_resumed` tokens are the turn's own."""
        start = len(context) - num_resumed
        turn = context[start:].tolist()
        if self._sampling.is_penalized:
            ids = torch.from_numpy(context[:start].astype(np.int64))
            self._window = TokenWindow.of_turn(ids, torch.zeros(1, dtype=torch.int64), vocab_size)
        for token_id in turn:
            self.accept(token_id)

    def shape(self, logits: torch.Tensor) -> Shaped:
        """Shape one row in place.

        Args:
            logits: [V] float32.

        Raises:
            InvalidRequestError: Of its grammar.

        """
        sampling = self._sampling
        if self._window is not None or sampling.logit_bias:
            logits.copy_(shifted(logits.unsqueeze(0), sampling, self._window)[0])
        if not sampling.is_truncated:
            return Shaped(None, False)
        allowed = self._allowed(len(logits))
        if allowed is not None:
            logits.masked_fill_(~torch.from_numpy(allowed), -torch.inf)
        is_left = cut_support(logits, sampling)
        logits.masked_fill_(~is_left, -torch.inf)
        is_forced = allowed is not None and int(np.count_nonzero(allowed)) == 1
        return Shaped(pack_support(is_left.numpy()), is_forced)

    def accept(self, token_id: int) -> None:
        """Go on after a token that was drawn.

        Raises:
            InvalidRequestError: The grammar does not allow it.

        """
        if self._window is not None:
            self._window.counts[0, token_id] += 1.0
        if self._forced:
            self._forced.popleft()
        elif self._grammar is not None:
            self._grammar.accept(token_id)

    def _allowed(self, vocab_size: int) -> np.ndarray | None:
        if self._forced:
            one = np.zeros(vocab_size, bool)
            one[self._forced[0]] = True
            return one
        if self._grammar is None:
            return None
        return unpack_support(self._grammar.allowed(), vocab_size)


def top_tokens(
    logits: torch.Tensor, temperature: float, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [K] and logprobs [K] of the likeliest tokens of a shaped row [V]."""
    scaled = logits if temperature in {0.0, 1.0} else logits * (1.0 / temperature)
    values, ids = torch.log_softmax(scaled, -1).topk(min(count, len(logits)))
    return ids.numpy().astype(np.int32), values.numpy()
