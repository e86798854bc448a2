"""Assembles sampled token ids into text and tool calls while they arrive.

```
 text ──first special token──▶ held ──end of a call──▶ held ... ──stop token──▶ done
   │                    └─ malformed, or a tool that was not offered ─▶ literal
   └─ content deltas ──stop text──▶ done                                 └─ content deltas
```
`ReplyAssembler` holds tokens back until they parse as a call. Reasoning at the beginning, whether
the reply or its prompt opens it, is not content. A malformed turn is still shown, as plain text.
`StopScanner` finds the client's stop texts, wherever tokens and chunks split them.
"""

import codecs
from collections.abc import Collection, Iterable, Iterator, Sequence

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, ParsedTurn
from penstock.actors.policy.chat.token_kinds import reasoning_end, reasoning_marks
from penstock.gateway.conversation import CallDelta, Delta, TextDelta
from penstock.messages.rollout import ToolCall


class StopScanner:
    """Passes text through up to the first stop text; holds back a possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held: str = ""
        self.found: str = ""
        """The stop text that ended the reply; empty if none did."""

    def push(self, text: str) -> str:
        """Take more text; return the part that is certainly before any stop text."""
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        places = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            # The earliest one ends the reply; of several at one place, the longest.
            at, self.found = min(places, key=lambda place: (place[0], -len(place[1])))
            self._held = ""
            return text[:at]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return the text held back; call it when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop text."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class ReplyAssembler:
    """Converts the tokens of one reply to deltas, in order, each exactly once."""

    def __init__(
        self,
        chat_format: ChatFormat,
        tools: Collection[str],
        context_ids: Sequence[int],
        offered: OfferedTools,
        stops: Sequence[str] = (),
    ) -> None:
        """Begin a reply.

        Args:
            chat_format: Chat format of the policy.
            tools: Names of the tools that the reply may call.
            context_ids: Token ids of the prompt.
            offered: Tools as the prompt presents them.
            stops: Texts that end the reply.

        """
        self._format = chat_format
        self._tools = tools
        self._context_ids = context_ids
        self._offered = offered
        self._stops = StopScanner(stops)
        # Incremental: a character may be split over tokens.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_ids: list[int] = []
        self._marks = reasoning_marks(chat_format.tokenizer)
        self._closing = reasoning_end(chat_format.tokenizer, context_ids)
        """Token that closes the reasoning in progress; None outside of it."""
        self._reasoning_ids: list[int] = []
        """All tokens of the reasoning at the beginning, with its marks."""
        self._is_after_reasoning = False
        """Whether only white space has followed the reasoning so far."""
        self._is_literal = False
        self._is_ended = False
        self.text = ""
        self.calls: list[ToolCall] = []

    @property
    def stop_text(self) -> str:
        """The stop text that ended the reply; empty if none did."""
        return self._stops.found

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        """Take more tokens; return the deltas that no later token can change."""
        return _joined(delta for token_id in token_ids for delta in self._push_token(token_id))

    def finish(self) -> list[Delta]:
        """Return what was held back: half a character, or a malformed call as text."""
        held, self._held_ids = self._held_ids, []
        if self.stop_text:
            return []
        deltas = [*self._parsed(held, is_cut=not self._is_ended), *self._content([], final=True)]
        return _joined([*deltas, *self._shown(self._stops.finish())])

    def _push_token(self, token_id: int) -> Iterator[Delta]:
        if self._is_ended or self.stop_text:
            return
        special = self._format.tokenizer.special_of(token_id)
        if token_id in self._format.stop_ids:
            self._is_ended = True
        elif self._closing is not None:
            self._reasoning_ids.append(token_id)
            if token_id == self._closing:
                self._closing, self._is_after_reasoning = None, True
        elif token_id in self._marks and self._is_untouched:
            self._reasoning_ids.append(token_id)
            self._closing = self._marks[token_id]
        # After the first special token or call, text is shown only once it parses.
        elif self._is_literal or (special is None and not self._held_ids and not self.calls):
            yield from self._content([token_id])
        else:
            self._held_ids.append(token_id)
            if token_id == self._format.call_end_id:
                ids, self._held_ids = self._held_ids, []
                yield from self._parsed(ids)

    @property
    def _is_untouched(self) -> bool:
        """Whether the reply has nothing but white space so far."""
        return not (self.text.strip() or self._held_ids or self.calls or self._reasoning_ids)

    def _parsed(self, ids: list[int], *, is_cut: bool = False) -> Iterator[Delta]:
        """Yield the text and calls of held ids, or the ids as plain text if they are malformed.

        The markup of a call that was cut off says nothing to a client; the finish reason does.
        """
        if not ids:
            return
        # Parsed as a complete turn, which it may become: hence the stop token.
        turn = self._format.parse_turn(
            [*self._reasoning_ids, *ids, self._format.stop_ids[0]],
            self._context_ids,
            self._offered,
        )
        if isinstance(turn, ParsedTurn) and all(call.name in self._tools for call in turn.calls):
            yield from self._text(turn.text)
            for call in () if self.stop_text else turn.calls:
                # A stop text cannot span a call: text held back before it is certain now.
                yield from self._shown(self._stops.finish())
                self.calls.append(call)
                yield CallDelta(len(self.calls) - 1, call)
        elif not is_cut:
            self._is_literal = True
            yield from self._content(ids)

    def _content(self, ids: list[int], *, final: bool = False) -> Iterator[Delta]:
        data = self._format.tokenizer.decode_bytes(ids)
        yield from self._text(self._utf8.decode(data, final))

    def _text(self, text: str) -> Iterator[Delta]:
        if self._is_after_reasoning:
            text = text.lstrip()
            self._is_after_reasoning = not text
        yield from self._shown(self._stops.push(text))

    def _shown(self, text: str) -> Iterator[Delta]:
        if text:
            self.text += text
            yield TextDelta(text)


def _joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Merge adjacent texts, so that a chunk of tokens makes one delta and one event."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + delta.text)
        else:
            merged.append(delta)
    return merged
