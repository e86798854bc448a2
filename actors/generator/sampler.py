"""Drawing tokens: one uniform number per token, from the request's own stream.

Inverse-CDF sampling uses up exactly one number per token, so a request's draws depend on its seed
and its logits only, never on who shares the batch. Whatever the values of a request and its logits
are, a token is one of the vocabulary, and has a probability: `SamplingBatch` keeps values where
float32 can work with them, and who calls sets rows aside that are no numbers (`finite_rows`). Rows
come shaped (`shaper.py`): -inf is a token that cannot be drawn.

Grammars compiled to token masks, by llguidance; bounded in size and time.

A mask is computed where a token is sampled, between two decoding steps. Compiling takes a thread of
its own, off the event loop and off the engine's worker. Whatever a grammar makes the library do is
counted in its own units (fuel, items, states), so a hostile one ends with an error, not with time.

Shapes the logits of requests that ask for more than a temperature.

    row of logits ──shifted──▶ grammar's mask ──cut_support──▶ -inf where no token can be drawn
                                                       └──▶ the support, recorded with the token

Most requests have no shaper: nothing is done for them, and their arithmetic is as without this.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import llguidance
import numpy as np
import torch

from penstock.actors.generator.engine import InvalidRequestError
from penstock.actors.policy.settings import TEMPERATURE_MAX
from penstock.actors.policy.shaping import TokenWindow, cut_support, shifted
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.kernels.support import pack_support, row_bytes, unpack_support
from penstock.messages.task import TEMPERATURE_MIN, Sampling

COMPILE_S_MAX = 5.0
NUM_COMPILING_MAX = 8
"""Grammars that wait to be compiled; more are refused."""
_NUM_KEPT_MAX = 64
"""Compiled grammars that are kept for the next request with the same text."""
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
"""20 ms to build, and at most about as long for each mask."""
_ERROR_CHARS_MAX = 300


class TurnGrammar:
    """What one turn may say next; belongs to the engine's worker thread once it is in use."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> np.ndarray:
        """Return uint8 [row_bytes(V)]: a bit for each token that may come next.

        Raises:
            InvalidRequestError: The grammar is too complex, or nothing may come next.

        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        width = row_bytes(self._vocab_size)
        row = np.zeros(width, np.uint8)
        row[: min(width, len(bits))] = bits[:width]
        if self._vocab_size % 8:
            row[-1] &= (1 << self._vocab_size % 8) - 1
        if self._matcher.is_error() or not row.any():
            raise _refusal(self._matcher.get_error() or "it allows no token here")
        return row

    def accept(self, token_id: int) -> None:
        """Go on after a token that was allowed.

        Raises:
            InvalidRequestError: It was not, or the grammar is too complex.

        """
        if not self._matcher.consume_token(token_id):
            raise _refusal(self._matcher.get_error())


class GrammarMasks:
    """Compiles grammars over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int], vocab_size: int) -> None:
        """Take the tokenizer; it is read when the first grammar comes.

        Args:
            tokenizer: the policy's.
            stop_ids: tokens that end a turn: allowed wherever a grammar may end.
            vocab_size: of the policy, which may have more ids than the tokenizer.

        """
        self._words = _Words(tokenizer, stop_ids[0])
        self._stop_ids = list(stop_ids)
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "grammar")
        self._num_compiling = 0

    async def open(self, text: str) -> TurnGrammar:
        """Return a grammar at its beginning.

        Raises:
            InvalidRequestError: It does not compile, or not within its limits; or too many do.

        """
        if text not in self._compiled:
            if self._num_compiling >= NUM_COMPILING_MAX:
                raise _refusal(f"{self._num_compiling} others are being compiled")
            self._num_compiling += 1
            job = asyncio.get_running_loop().run_in_executor(self._pool, self._compile, text)
            job.add_done_callback(self._done)
            try:
                async with asyncio.timeout(COMPILE_S_MAX):
                    matcher = await asyncio.shield(job)
            except TimeoutError as error:
                raise _refusal(f"not compiled in {COMPILE_S_MAX:g} s") from error
            self._keep(text, matcher)
        return self._opened(text)

    def open_now(self, text: str) -> TurnGrammar:
        """Return a grammar at its beginning, compiled here: of a text that `open` has taken.

        Raises:
            InvalidRequestError: It does not compile.

        """
        if text not in self._compiled:
            self._keep(text, self._compile(text))
        return self._opened(text)

    def _keep(self, text: str, matcher: llguidance.LLMatcher) -> None:
        self._compiled[text] = matcher
        while len(self._compiled) > _NUM_KEPT_MAX:
            self._compiled.popitem(last=False)

    def _opened(self, text: str) -> TurnGrammar:
        self._compiled.move_to_end(text)
        return TurnGrammar(self._compiled[text].deep_copy(), self._vocab_size)

    def _done(self, job: asyncio.Future[llguidance.LLMatcher]) -> None:
        self._num_compiling -= 1
        if not job.cancelled():
            job.exception()  # Retrieved, even where its request has timed out.

    def _compile(self, text: str) -> llguidance.LLMatcher:
        if self._tokenizer is None:
            wrapper = llguidance.TokenizerWrapper(self._words)
            num_ids = max(self._vocab_size, len(self._words.tokens))
            self._tokenizer = llguidance.LLTokenizer(wrapper, num_ids, self._stop_ids)
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher


class _Words:
    """The tokenizer as the library asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_id
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.bytes_of(index) or b"" for index in ids]
        self.special_token_ids = [i for i in ids if tokenizer.special_of(i) is not None]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text)


def _refusal(cause: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling.grammar: {cause[:_ERROR_CHARS_MAX]}")


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
