"""Sampling of tokens: grammar masks, logit shaping, and reproducible draws.

Draws: inverse-CDF sampling takes exactly one uniform number per token from the request's own
stream. So the tokens of a request depend only on its seed and its logits, never on other requests
in the batch. Every draw yields a token of the vocabulary with a probability: `SamplingBatch` clamps
settings to a range that float32 can handle, and callers remove rows that are not finite
(`finite_rows`).

Grammars: llguidance compiles them to token masks. A mask is computed between two decoding steps;
compiling runs in a separate thread, neither on the event loop nor on the engine's worker. All work
is bounded in the library's own units (fuel, items, states), so a hostile grammar ends with an error
instead of blocking the engine.

Shaping: only requests that ask for more than a temperature have a `TurnShaper`.

    row of logits ──shifted──▶ grammar mask ──cut_support──▶ -inf for tokens that cannot be drawn
                                                     └──▶ the support, recorded with the token

Requests without a shaper are computed exactly as if shaping did not exist.
"""

import asyncio
import logging
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

log = logging.getLogger(__name__)

COMPILE_S_MAX = 5.0
"""Longest time in seconds that a request waits for its grammar to be compiled."""
NUM_COMPILING_MAX = 8
"""Maximum grammars that wait to be compiled; further ones are refused."""
_NUM_KEPT_MAX = 64
"""Maximum compiled grammars cached for later requests with the same text."""
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
"""Limits of llguidance: building a grammar takes about 20 ms, each mask at most about as long."""
_ERROR_CHARS_MAX = 300


class TurnGrammar:
    """State of a grammar within one turn; once in use, it belongs to the engine's worker thread."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next, one bit each: uint8 [row_bytes(V)].

        Raises:
            InvalidRequestError: The grammar is too complex or allows no token.

        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        width = row_bytes(self._vocab_size)
        row = np.zeros(width, np.uint8)
        row[: min(width, len(bits))] = bits[:width]
        # The library may have more ids than the policy: clear the padding bits of the last byte.
        if self._vocab_size % 8:
            row[-1] &= (1 << self._vocab_size % 8) - 1
        if self._matcher.is_error() or not row.any():
            raise _refusal(self._matcher.get_error() or "it allows no token here")
        return row

    def accept(self, token_id: int) -> None:
        """Advance the grammar by one token.

        Raises:
            InvalidRequestError: The token is not allowed, or the grammar is too complex.

        """
        if not self._matcher.consume_token(token_id):
            raise _refusal(self._matcher.get_error())


class GrammarMasks:
    """Compiles grammars for one tokenizer and caches them."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int], vocab_size: int) -> None:
        """Keep the tokenizer; it is converted when the first grammar is compiled.

        Args:
            tokenizer: Tokenizer of the policy.
            stop_ids: Tokens that end a turn; allowed wherever a grammar may end.
            vocab_size: Vocabulary size of the policy, which may exceed the tokenizer's.

        """
        self._words = _TokenTable(tokenizer, stop_ids[0])
        self._stop_ids = list(stop_ids)
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "grammar")
        self._num_compiling = 0

    async def open(self, text: str) -> TurnGrammar:
        """Return a grammar in its initial state, compiling it first if it is not cached.

        Raises:
            InvalidRequestError: It does not compile within its limits, or too many are waiting.

        """
        if text not in self._compiled:
            if self._num_compiling >= NUM_COMPILING_MAX:
                raise _refusal(
                    f"{self._num_compiling} others are already being compiled, try later"
                )
            self._num_compiling += 1
            job = asyncio.get_running_loop().run_in_executor(self._pool, self._compile, text)
            job.add_done_callback(self._done)
            try:
                # Shielded: a thread cannot be cancelled, and `_done` must count it until it ends.
                async with asyncio.timeout(COMPILE_S_MAX):
                    matcher = await asyncio.shield(job)
            except TimeoutError as error:
                log.warning("grammar of %d characters not compiled in time", len(text))
                raise _refusal(f"not compiled within {COMPILE_S_MAX:g} s") from error
            self._cache(text, matcher)
        return self._fresh_copy(text)

    def open_now(self, text: str) -> TurnGrammar:
        """Return a grammar in its initial state, compiling it in this thread.

        Only for texts that `open` has accepted before, in this process or another.

        Raises:
            InvalidRequestError: It does not compile.

        """
        if text not in self._compiled:
            self._cache(text, self._compile(text))
        return self._fresh_copy(text)

    def _cache(self, text: str, matcher: llguidance.LLMatcher) -> None:
        self._compiled[text] = matcher
        while len(self._compiled) > _NUM_KEPT_MAX:
            self._compiled.popitem(last=False)

    def _fresh_copy(self, text: str) -> TurnGrammar:
        self._compiled.move_to_end(text)
        return TurnGrammar(self._compiled[text].deep_copy(), self._vocab_size)

    def _done(self, job: asyncio.Future[llguidance.LLMatcher]) -> None:
        self._num_compiling -= 1
        if not job.cancelled():
            # Retrieve the error, or asyncio reports it as unhandled if the request timed out.
            job.exception()

    def _compile(self, text: str) -> llguidance.LLMatcher:
        # Converted lazily, since many runs never use a grammar.
        if self._tokenizer is None:
            wrapper = llguidance.TokenizerWrapper(self._words)
            num_ids = max(self._vocab_size, len(self._words.tokens))
            self._tokenizer = llguidance.LLTokenizer(wrapper, num_ids, self._stop_ids)
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher


class _TokenTable:
    """Adapter of a `Tokenizer` to the interface that llguidance expects."""

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


class PositionSupport(NamedTuple):
    """Support of one position: the tokens that could be drawn there."""

    support: np.ndarray | None
    """Bit set of the tokens, uint8 [row_bytes(V)]; None if all tokens could be drawn."""
    is_forced: bool
    """Whether the grammar allowed exactly one token."""


class TurnShaper:
    """Shapes the logits of one request, following its tokens."""

    def __init__(self, sampling: Sampling, grammar: TurnGrammar | None) -> None:
        """Start at the first token of a turn.

        Args:
            sampling: Settings of the turn.
            grammar: Grammar of what follows the forced prefix, if any.

        """
        self._sampling = sampling
        self._grammar = grammar
        self._forced = deque(sampling.grammar.prefix_ids if sampling.grammar else ())
        self._window: TokenWindow | None = None

    @classmethod
    def of(cls, sampling: Sampling, grammar: TurnGrammar | None) -> "TurnShaper | None":
        """Return a shaper, or None if the settings need none."""
        shapes = sampling.is_truncated or sampling.is_penalized or sampling.logit_bias
        return cls(sampling, grammar) if shapes else None

    def begin(self, context: np.ndarray, vocab_size: int, num_resumed: int) -> None:
        """Process the context, whose last `num_resumed` tokens already belong to the turn."""
        start = len(context) - num_resumed
        turn = context[start:].tolist()
        if self._sampling.is_penalized:
            ids = torch.from_numpy(context[:start].astype(np.int64))
            self._window = TokenWindow.of_turn(ids, torch.zeros(1, dtype=torch.int64), vocab_size)
        for token_id in turn:
            self.accept(token_id)

    def shape(self, logits: torch.Tensor) -> PositionSupport:
        """Shape one row in place and return its support.

        Args:
            logits: Logits of the next token, float32 [V].

        Raises:
            InvalidRequestError: The grammar is too complex or allows no token.

        """
        sampling = self._sampling
        if self._window is not None or sampling.logit_bias:
            logits.copy_(shifted(logits.unsqueeze(0), sampling, self._window)[0])
        if not sampling.is_truncated:
            return PositionSupport(None, False)
        allowed = self._allowed(len(logits))
        if allowed is not None:
            logits.masked_fill_(~torch.from_numpy(allowed), -torch.inf)
        is_left = cut_support(logits, sampling)
        logits.masked_fill_(~is_left, -torch.inf)
        is_forced = allowed is not None and int(np.count_nonzero(allowed)) == 1
        return PositionSupport(pack_support(is_left.numpy()), is_forced)

    def accept(self, token_id: int) -> None:
        """Advance by a token that was drawn.

        Raises:
            InvalidRequestError: The grammar does not allow the token.

        """
        if self._window is not None:
            self._window.counts[0, token_id] += 1.0
        if self._forced:
            self._forced.popleft()
        elif self._grammar is not None:
            self._grammar.accept(token_id)

    def _allowed(self, vocab_size: int) -> np.ndarray | None:
        if self._forced:
            allowed = np.zeros(vocab_size, bool)
            allowed[self._forced[0]] = True
            return allowed
        if self._grammar is None:
            return None
        return unpack_support(self._grammar.allowed(), vocab_size)


def top_tokens(
    logits: torch.Tensor, temperature: float, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [K] and logprobs [K] of the most likely tokens of a shaped row [V]."""
    # Greedy requests report the untempered distribution, as `behavior_logprobs` does.
    scaled = logits if temperature in {0.0, 1.0} else logits * (1.0 / temperature)
    values, ids = torch.log_softmax(scaled, -1).topk(min(count, len(logits)))
    return ids.cpu().numpy().astype(np.int32), values.cpu().numpy()


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling settings of B rows, clamped to the range that float32 can handle."""

    temperatures: list[float]
    """Temperature of each row: 0, or from `TEMPERATURE_MIN` to `TEMPERATURE_MAX`."""
    uniforms: list[float]
    """Uniform random number of each row, in [0, 1)."""

    def __post_init__(self) -> None:
        """Clamp the temperatures; NaN becomes the upper bound."""
        # `not t <= 0.0` rather than `t > 0.0`: a NaN must not count as greedy.
        temperatures = [
            max(TEMPERATURE_MIN, min(TEMPERATURE_MAX, t)) if not t <= 0.0 else 0.0
            for t in self.temperatures
        ]
        object.__setattr__(self, "temperatures", temperatures)


def finite_rows(logits: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return which rows of float32 [M, V] are finite, as bool [M]."""
    # A sum is NaN or infinite if any element is, and needs no [M, V] array of booleans.
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(logits, torch.Tensor) and logits.device.type != "cpu":
            return np.isfinite(logits.sum(1).cpu().numpy())
        values = logits.numpy() if isinstance(logits, torch.Tensor) else logits
        return np.isfinite(values.sum(axis=1))


def uniforms_for(sampling: Sampling, num_resumed: int = 0) -> list[float]:
    """Return the uniform numbers of a request, one for each token that it may draw.

    A turn that was started elsewhere continues after the numbers that its first tokens used.
    """
    # A Philox key has 128 bits.
    stream = np.random.Generator(np.random.Philox(key=sampling.seed % 2**128))
    return stream.random(num_resumed + sampling.num_tokens_max)[num_resumed:].tolist()


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[list[int], list[float]]:
    """Draw one token per row.

    Args:
        logits: Shaped logits, float32 [B, V]; overwritten.
        batch: Sampling settings of the B rows.

    Returns:
        Token ids, and their log-probabilities under the distribution they were drawn from.

    """
    greedy = min(batch.temperatures) <= 0.0
    if any(temperature != 1.0 for temperature in batch.temperatures):
        scale = torch.tensor([1.0 / t if t > 0 else 1.0 for t in batch.temperatures])
        logits.mul_(scale.unsqueeze(1).to(logits.device))
    logprobs = torch.log_softmax(logits, dim=-1)
    cdf = logprobs.exp().cumsum_(-1)
    # Times the last entry, since rounding makes the sum of the probabilities differ from 1.
    uniforms = torch.tensor(batch.uniforms, dtype=torch.float32).unsqueeze(1)
    targets = uniforms.to(cdf.device) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, targets, right=True)
    if greedy:
        is_greedy = torch.tensor([t <= 0.0 for t in batch.temperatures]).unsqueeze(1)
        is_greedy = is_greedy.to(logits.device)
        tokens = torch.where(is_greedy, logprobs.argmax(-1, keepdim=True), tokens)
    tokens = _within_support(tokens, cdf)
    return tokens.squeeze(1).tolist(), logprobs.gather(1, tokens).squeeze(1).tolist()


def _within_support(tokens: torch.Tensor, cdf: torch.Tensor) -> torch.Tensor:
    """Move draws that rounding put past the end of the CDF to the last token with any mass."""
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous(), right=False)
    return torch.minimum(tokens, last).clamp_(max=cdf.shape[1] - 1)
