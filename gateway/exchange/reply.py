"""Assembles sampled token ids into text and tool calls while they arrive.

```
 text ──first special token──▶ held ──end of a call──▶ held ... ──stop token──▶ done
   │                    └─ malformed, or a tool that was not offered ─▶ literal
   └─ content deltas ──stop text──▶ done                                 └─ content deltas
```
`ReplyAssembler` holds tokens back until they parse as a call, or as reasoning, which the chat
format leaves out of the content. A malformed turn is still shown to the user, as plain text.
`StopScanner` finds the client's stop texts, wherever tokens and chunks split them. `Choice` is one
reply of a request, from its first token to its record.
"""

import codecs
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, ParsedTurn
from penstock.actors.policy.sampling import make_turn
from penstock.gateway.conversation import Call, CallDelta, Delta, Finish, LiveRequest, TextDelta
from penstock.gateway.exchange.generation import Generation
from penstock.gateway.exchange.plan import Plan, ReplyMemory, sent_call
from penstock.gateway.record import AnsweredRequest, Requester
from penstock.gateway.reply_facts import reply_facts
from penstock.messages.rollout import StopReason, ToolCall


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
        """Return what was held back: reasoning, an unfinished call, half a character."""
        held, self._held_ids = self._held_ids, []
        if self.stop_text:
            return []
        deltas = [*self._parsed(held), *self._content([], final=True)]
        return _joined([*deltas, *self._shown(self._stops.finish())])

    def _push_token(self, token_id: int) -> Iterator[Delta]:
        if self._is_ended or self.stop_text:
            return
        special = self._format.tokenizer.special_of(token_id)
        if token_id in self._format.stop_ids:
            self._is_ended = True
        # After the first special token or call, text is shown only once it parses.
        elif self._is_literal or (special is None and not self._held_ids and not self.calls):
            yield from self._content([token_id])
        else:
            self._held_ids.append(token_id)
            if token_id == self._format.call_end_id:
                ids, self._held_ids = self._held_ids, []
                yield from self._parsed(ids)

    def _parsed(self, ids: list[int]) -> Iterator[Delta]:
        """Yield the text and calls of held ids, or the ids as plain text if they are malformed."""
        if not ids:
            return
        # Parsed as a complete turn, which it may become: hence the stop token.
        turn = self._format.parse_turn(
            [*ids, self._format.stop_ids[0]], self._context_ids, self._offered
        )
        if isinstance(turn, ParsedTurn) and all(call.name in self._tools for call in turn.calls):
            yield from self._text(turn.text)
            for call in () if self.stop_text else turn.calls:
                # A stop text cannot span a call: text held back before it is certain now.
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
    """Merge adjacent texts, so that a chunk of tokens makes one delta and one event."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + delta.text)
        else:
            merged.append(delta)
    return merged


# Seeds are signed 64-bit integers on the wire.
_NUM_SEEDS = 2**63


class Choice:
    """One reply of a request; implements `Replied`."""

    def __init__(
        self,
        index: int,
        request_id: str,
        conversation: LiveRequest,
        plan: Plan,
        chat_format: ChatFormat,
    ) -> None:
        """Prepare; nothing is sampled yet.

        Args:
            index: Position among the choices of the request.
            request_id: Id of this reply.
            conversation: The request.
            plan: Context and sampling parameters.
            chat_format: Chat format of the policy.

        """
        self.index = index
        self.request_id = request_id
        self._format = chat_format
        self._tools = conversation.offered
        self._plan = plan
        self._assembler = ReplyAssembler(
            chat_format,
            self._tools,
            plan.context_ids,
            plan.tools,
            conversation.sampling.stops,
        )
        # With one seed, all choices would be equal; the first keeps the request's own.
        seed = (plan.sampling.seed + index) % _NUM_SEEDS
        sampling = msgspec.structs.replace(plan.sampling, seed=seed) if index else plan.sampling
        self.generation = Generation(
            request_id, plan.session_id, plan.context_ids, sampling, is_named=plan.is_named
        )
        self.is_recorded = False
        self.starts_segment = False
        """Whether the prompt has a summary instead of the turns before it."""

    @property
    def text(self) -> str:
        """Text of the reply so far."""
        return self._assembler.text

    @property
    def calls(self) -> Sequence[ToolCall]:
        """Tool calls so far."""
        return self._assembler.calls

    @property
    def token_ids(self) -> Sequence[int]:
        """Ids of all tokens sampled so far."""
        return self.generation.sampled.token_ids

    @property
    def logprobs(self) -> Sequence[float]:
        """Behavior logprobs of `token_ids`."""
        return self.generation.sampled.logprobs

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]]:
        """Ids and logprobs of the most likely tokens at each position; empty unless requested."""
        return self.generation.sampled.top

    @property
    def stop_text(self) -> str:
        """The stop text that ended the reply; empty if none did."""
        return self._assembler.stop_text

    @property
    def finish(self) -> Finish:
        """Why the reply ended."""
        if self.stop_text:
            return Finish.STOP_TEXT
        if self.generation.sampled.stop_reason is StopReason.LENGTH:
            return Finish.LENGTH
        return Finish.CALLS if self.calls else Finish.STOP

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Take more tokens; return the deltas that no later token can change."""
        return self._assembler.push(token_ids)

    def close(self) -> list[Delta]:
        """Return what was held back; call it when no more tokens come."""
        return self._assembler.finish()

    def remember(self, memory: ReplyMemory) -> None:
        """Remember the ids of a complete reply, for the next turn of the session."""
        # A reply that was cut off ends without a stop token, and could not stand in a prompt as it
        # is; after a stop text, the client's text is shorter than the ids.
        ids = self.token_ids
        if ids and ids[-1] in self._format.stop_ids and not self.stop_text:
            calls = [call.made for call in self.sent_calls]
            memory.put(self._plan.owner, self._plan.session_id, self.text, calls, ids)

    @property
    def sent_calls(self) -> list[Call]:
        """The calls in the form that the client gets."""
        return [sent_call(call, self._tools) for call in self.calls]

    def answered(self, client: Requester, chain: str, *, at: float) -> AnsweredRequest:
        """Return the reply as it goes on record; at least one token must be sampled.

        Args:
            client: Who made the request.
            chain: Chain of the session that the reply belongs to.
            at: Time of the answer in Unix seconds.

        """
        sampled, plan = self.generation.sampled, self._plan
        turn = make_turn(
            self._format, plan.context_ids, sampled, plan.tools, self.generation.sampling
        )
        turn = msgspec.structs.replace(turn, starts_segment=self.starts_segment)
        return AnsweredRequest(
            request_id=self.request_id,
            session_id=plan.session_id,
            chain=chain,
            client=client,
            route=self.generation.route,
            channel=self.generation.channel,
            facts=reply_facts(
                self.text,
                turn.calls,
                num_tokens=len(sampled.token_ids),
                offered=self._tools,
                is_broken=bool(turn.parse_error),
            ),
            at=at,
            turn=turn,
            policy_version=sampled.min_policy_version,
            replica=sampled.replica,
        )
