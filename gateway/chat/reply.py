"""From sampled ids to content and tool calls, while they come.

```
 text ──first special token──▶ call ──CALL_CLOSE──▶ call ... ──END──▶ done
   │                    └─ malformed, or a tool that was not offered ─▶ literal
   └─ content deltas                                                     └─ content deltas
```
A turn that is not well-formed is still shown to the user, as the text it is.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from penstock.actors.policy import special_tokens
from penstock.actors.policy.parse import ParsedTurn, parse_turn
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.gateway.chat.schema import Tool
from penstock.messages.rollout import ToolCall


class TextDelta(msgspec.Struct, frozen=True):
    """More content."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """One whole call."""

    index: int
    call: ToolCall


Delta = TextDelta | CallDelta


class ReplyAssembler:
    """Turns the tokens of one reply into deltas, in order, each once."""

    def __init__(self, tokenizer: Tokenizer, tools: Mapping[str, Tool]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._call_ids: list[int] = []
        self._is_literal = not tools
        self._is_ended = False
        self.text = ""
        self.calls: list[ToolCall] = []

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        """Take more tokens; return what is now certain."""
        return _joined(delta for token_id in token_ids for delta in self._push_one(token_id))

    def finish(self) -> list[Delta]:
        """Return what was held back: a call that never closed, half a character."""
        held, self._call_ids = self._call_ids, []
        return _joined([*self._content(held), *self._content([], final=True)])

    def _push_one(self, token_id: int) -> Iterator[Delta]:
        if self._is_ended:
            return
        special = self._tokenizer.special_of(token_id)
        if special == special_tokens.END:
            self._is_ended = True
        elif self._is_literal or (special is None and not self._call_ids and not self.calls):
            yield from self._content([token_id])
        else:
            self._call_ids.append(token_id)
            if special == special_tokens.CALL_CLOSE:
                yield from self._close_call()

    def _close_call(self) -> Iterator[Delta]:
        ids, self._call_ids = self._call_ids, []
        turn = parse_turn(self._tokenizer, [*ids, self._tokenizer.end_id])
        if isinstance(turn, ParsedTurn) and not turn.text and turn.calls[0].name in self._tools:
            self.calls.append(turn.calls[0])
            yield CallDelta(len(self.calls) - 1, turn.calls[0])
        else:
            self._is_literal = True
            yield from self._content(ids)

    def _content(self, ids: list[int], *, final: bool = False) -> Iterator[Delta]:
        text = self._utf8.decode(self._tokenizer.decode_bytes(ids), final)
        if text:
            self.text += text
            yield TextDelta(text)


def _joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Merge neighboring texts, so that a chunk of tokens makes one delta."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + delta.text)
        else:
            merged.append(delta)
    return merged
