"""What a turn's sampled tokens are for, by the chat format's own markup: counted, not parsed.

```
 <think> … </think>   thinking     (a prompt may open it: then it begins with the turn)
 <call …> … </call>   call
 anything else        final message where the turn has no calls and parsed, else thinking
```
Works from recorded ids alone, and for turns that do not parse. A format whose calls have no added
tokens of their own has every token of a turn with calls counted as a call's, but for marked
thinking.
"""

from collections.abc import Sequence

import msgspec

from penstock.actors.policy import special_tokens
from penstock.actors.policy.tokenizer import Tokenizer

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_CALLS = (
    (special_tokens.CALL_OPEN, special_tokens.CALL_CLOSE),
    *((special_tokens.call_open(name), special_tokens.CALL_CLOSE)
      for name in special_tokens.TOOL_NAMES),
    ("<tool_call>", "</tool_call>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)  # fmt: skip


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens of one turn by kind."""

    thinking: int = 0
    call: int = 0
    final: int = 0


class TokenKinds:
    """Counts by one tokenizer's markup."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look the markup up once."""
        self._thinking = _ids(tokenizer, _THINKING)
        self._calls = _ids(tokenizer, _CALLS)
        self._thinking_ends = set(self._thinking.values())

    def count(
        self, token_ids: Sequence[int], context_ids: Sequence[int], *, is_final: bool
    ) -> TokenCounts:
        """Count one turn.

        Args:
            token_ids: sampled.
            context_ids: what opened it: its end says whether thinking is open.
            is_final: whether what is neither marked thinking nor a call is the final message.

        """
        closes = self._left_open(context_ids)
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
        if not self._calls:
            return TokenCounts(thinking=thinking, call=call + rest)
        return TokenCounts(thinking=thinking + rest, call=call)

    def _left_open(self, context_ids: Sequence[int]) -> int | None:
        """Return the token that closes the thinking that a prompt opened, or None."""
        for token in reversed(context_ids):
            if token in self._thinking_ends:
                return None
            if token in self._thinking:
                return self._thinking[token]
        return None


def _ids(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> dict[int, int]:
    """Return the closing token by the opening one, of those that the tokenizer has."""
    return {
        tokenizer.special_id(opening): tokenizer.special_id(closing)
        for opening, closing in pairs
        if tokenizer.has_special(opening) and tokenizer.has_special(closing)
    }
