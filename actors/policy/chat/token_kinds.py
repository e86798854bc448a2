"""Counts a turn's sampled tokens by purpose, based on the markup of the chat format.

```
 <think> … </think>   thinking     (a prompt may open it: then it begins with the turn)
 <call …> … </call>   call
 anything else        final message if the turn parsed and has no calls, else thinking
```
Needs only recorded ids and also works for turns that do not parse. If the format has no added
tokens for calls, all tokens of a turn with calls count as calls, except marked thinking.
"""

from collections.abc import Sequence

import msgspec

from penstock.actors.policy import special_tokens
from penstock.actors.policy.tokenizer import Tokenizer

_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<think:opensource>", "</think:opensource>"),
)
_CALLS = (
    (special_tokens.CALL_OPEN, special_tokens.CALL_CLOSE),
    *((special_tokens.call_open(name), special_tokens.CALL_CLOSE)
      for name in special_tokens.TOOL_NAMES),
    ("<tool_call>", "</tool_call>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)  # fmt: skip


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of sampled tokens of one turn, by kind."""

    thinking: int = 0
    call: int = 0
    final: int = 0


class TokenKinds:
    """Counter of token kinds, based on the markup of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look up the ids of the markup."""
        self._thinking = reasoning_marks(tokenizer)
        self._calls = _ids(tokenizer, _CALLS)

    def count(
        self, token_ids: Sequence[int], context_ids: Sequence[int], *, is_final: bool
    ) -> TokenCounts:
        """Count the tokens of one turn.

        Args:
            token_ids: Sampled ids of the turn.
            context_ids: Ids before the turn, which may have opened thinking.
            is_final: Whether tokens that are neither thinking nor a call are the final message.

        """
        # Some chat templates open the thinking in the prompt.
        closes = _left_open(self._thinking, context_ids)
        thinking = call = rest = 0
        in_call = False
        for token in token_ids:
            if closes is None:
                closes = self._thinking.get(token)
                if closes is None:
                    closes, in_call = self._calls.get(token), token in self._calls
            if closes is None:
                rest += 1
            elif in_call:
                call += 1
            else:
                thinking += 1
            if token == closes:
                closes, in_call = None, False
        if is_final:
            return TokenCounts(thinking=thinking, call=call, final=rest)
        # The format has no tokens for calls, so their text cannot be told from other text.
        if not self._calls:
            return TokenCounts(thinking=thinking, call=call + rest)
        return TokenCounts(thinking=thinking + rest, call=call)


def reasoning_marks(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the tokens that close reasoning, by the tokens that open it."""
    return _ids(tokenizer, _THINKING)


def reasoning_end(tokenizer: Tokenizer, context_ids: Sequence[int]) -> int | None:
    """Return the token that closes the reasoning opened by a prompt, or None.

    Many published formats open the reasoning in the prompt, so that a reply begins inside it.
    """
    return _left_open(reasoning_marks(tokenizer), context_ids)


def _left_open(marks: dict[int, int], context_ids: Sequence[int]) -> int | None:
    ends = set(marks.values())
    # The last marker in the context decides.
    for token in reversed(context_ids):
        if token in ends:
            return None
        if token in marks:
            return marks[token]
    return None


def _ids(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> dict[int, int]:
    """Return closing ids by opening ids, for the pairs that the tokenizer has."""
    return {
        tokenizer.special_id(opening): tokenizer.special_id(closing)
        for opening, closing in pairs
        if tokenizer.has_special(opening) and tokenizer.has_special(closing)
    }
