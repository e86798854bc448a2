"""From sampled ids to content and tool calls, while they come.

```
 text ──first special token──▶ held ──end of a call──▶ held ... ──stop token──▶ done
   │                    └─ malformed, or a tool that was not offered ─▶ literal
   └─ content deltas ──stop text──▶ done                                 └─ content deltas
```
A turn that is not well-formed is still shown to the user, as the text it is. What is held until it
parses is a call, or reasoning, which the chat format leaves out of the content.
"""

import codecs
from collections.abc import Collection, Iterable, Iterator, Sequence

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, ParsedTurn
from penstock.gateway.conversation import CallDelta, Delta, TextDelta
from penstock.gateway.exchange.stops import StopScanner
from penstock.messages.rollout import ToolCall


class ReplyAssembler:
    """Turns the tokens of one reply into deltas, in order, each once."""

    def __init__(
        self,
        chat_format: ChatFormat,
        tools: Collection[str],
        context_ids: Sequence[int],
        told: OfferedTools,
        stops: Sequence[str] = (),
    ) -> None:
        """Begin a reply.

        Args:
            chat_format: The policy's.
            tools: Names of the tools that it may call.
            context_ids: What it was sampled after.
            told: What the prompt says of the tools.
            stops: Texts that end it.

        """
        self._format = chat_format
        self._tools = tools
        self._context_ids = context_ids
        self._told = told
        self._stops = StopScanner(stops)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_ids: list[int] = []
        self._is_literal = False
        self._is_ended = False
        self.text = ""
        self.calls: list[ToolCall] = []

    @property
    def stop_text(self) -> str:
        """The stop text that ended it, or the empty string."""
        return self._stops.found

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        """Take more tokens; return what is now certain."""
        return _joined(delta for token_id in token_ids for delta in self._push_one(token_id))

    def finish(self) -> list[Delta]:
        """Return what was held back: reasoning, a call that never closed, half a character."""
        held, self._held_ids = self._held_ids, []
        if self.stop_text:
            return []
        deltas = [*self._held(held), *self._content([], final=True)]
        return _joined([*deltas, *self._shown(self._stops.finish())])

    def _push_one(self, token_id: int) -> Iterator[Delta]:
        if self._is_ended or self.stop_text:
            return
        special = self._format.tokenizer.special_of(token_id)
        if token_id in self._format.stop_ids:
            self._is_ended = True
        elif self._is_literal or (special is None and not self._held_ids and not self.calls):
            yield from self._content([token_id])
        else:
            self._held_ids.append(token_id)
            if token_id == self._format.call_end_id:
                ids, self._held_ids = self._held_ids, []
                yield from self._held(ids)

    def _held(self, ids: list[int]) -> Iterator[Delta]:
        """Return what held ids say, or the ids as text if that is nothing well-formed."""
        if not ids:
            return
        turn = self._format.parse_turn(
            [*ids, self._format.stop_ids[0]], self._context_ids, self._told
        )
        if isinstance(turn, ParsedTurn) and all(call.name in self._tools for call in turn.calls):
            yield from self._text(turn.text)
            for call in () if self.stop_text else turn.calls:
                yield from self._shown(self._stops.finish())
                self.calls.append(call)
                yield CallDelta(len(self.calls) - 1, call)
        else:
            self._is_literal = True
            yield from self._content(ids)

    def _content(self, ids: list[int], *, final: bool = False) -> Iterator[Delta]:
        data = self._format.tokenizer.decode_bytes(ids)
        yield from self._text(self._utf8.decode(data, final))

    def _text(self, text: str) -> Iterator[Delta]:
        yield from self._shown(self._stops.push(text))

    def _shown(self, text: str) -> Iterator[Delta]:
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
