"""Grammars compiled to token masks, by llguidance; bounded in size and time.

A mask is computed where a token is sampled, between two decoding steps. Compiling takes a thread of
its own, off the event loop and off the engine's worker. Whatever a grammar makes the library do is
counted in its own units (fuel, items, states), so a hostile one ends with an error, not with time.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import llguidance
import numpy as np

from penstock.actors.generator.engine import InvalidRequestError
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.kernels.support import row_bytes

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
