"""One reply of a request, from its first token to its record."""

import re
from collections import Counter
from collections.abc import Container, Sequence

import msgspec

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.sampling import make_turn
from penstock.gateway.conversation import Call, Delta, Finish, LiveRequest
from penstock.gateway.exchange.generation import Generation
from penstock.gateway.exchange.plan import Plan, ReplyMemory, sent_call
from penstock.gateway.exchange.reply import ReplyAssembler
from penstock.gateway.record import AnsweredRequest, Requester
from penstock.messages.gates import NUM_TOOLS_MAX, ReplyFacts
from penstock.messages.rollout import StopReason, ToolCall

TOOL_CHARS_MAX = 64
"""Maximum length of a tool name in a record."""
_TAIL_CHARS = 300
"""Length of the end of a reply that is searched for a question."""
# ASCII, full-width and Arabic question marks, then closing quotes, markup or brackets.
_QUESTION = re.compile(r"[?\uff1f\u061f][\"'*_)\]]*(\s|\Z)")
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


def reply_facts(
    text: str,
    calls: Sequence[ToolCall],
    *,
    num_tokens: int,
    offered: Container[str],
    is_broken: bool,
) -> ReplyFacts:
    """Return the counts of one reply without its content, which release gates compare by version.

    Args:
        text: Text of the reply.
        calls: Tool calls of the reply, including calls of tools that were not offered.
        num_tokens: Number of sampled tokens.
        offered: Names of the tools that the request offers.
        is_broken: Whether the chat format failed to parse the reply.

    """
    # Only offered names are kept: an invented one could carry content into the record.
    called = Counter(call.name[:TOOL_CHARS_MAX] for call in calls if call.name in offered)
    last_paragraph = text.rstrip().rpartition("\n\n")[2][-_TAIL_CHARS:]
    return ReplyFacts(
        num_tokens=num_tokens,
        is_empty=not text.strip() and not calls,
        is_invalid=is_broken or any(call.name not in offered for call in calls),
        is_question=not calls and _QUESTION.search(last_paragraph) is not None,
        num_calls=len(calls),
        tools=dict(called.most_common(NUM_TOOLS_MAX)),
    )
