"""One of a request's replies: sampled, read, remembered, recorded."""

from collections.abc import Sequence

import msgspec

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.sampling import make_turn
from penstock.gateway.conversation import Call, Delta, Finish, LiveRequest
from penstock.gateway.exchange.generation import Generation
from penstock.gateway.exchange.plan import Plan
from penstock.gateway.exchange.prompt import ReplyMemory, sent_call
from penstock.gateway.exchange.reply import ReplyAssembler
from penstock.gateway.record import Answered, Requester
from penstock.gateway.reply_facts import reply_facts
from penstock.messages.rollout import StopReason, ToolCall

_NUM_SEEDS = 2**63


class Choice:
    """One reply; a `Replied`."""

    def __init__(
        self,
        index: int,
        request_id: str,
        conversation: LiveRequest,
        plan: Plan,
        chat_format: ChatFormat,
    ) -> None:
        """Begin it: nothing is sampled yet.

        Args:
            index: Among the request's choices.
            request_id: Of this choice.
            conversation: The request.
            plan: What is sampled.
            chat_format: The policy's.

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
            plan.told,
            conversation.sampling.stops,
        )
        seed = (plan.sampling.seed + index) % _NUM_SEEDS
        sampling = msgspec.structs.replace(plan.sampling, seed=seed) if index else plan.sampling
        self.generation = Generation(
            request_id, plan.session_id, plan.context_ids, sampling, is_named=plan.is_named
        )
        self.is_recorded = False
        self.starts_segment = False
        """Whether its prompt has a summary of all that was sampled before."""

    @property
    def text(self) -> str:
        """The content."""
        return self._assembler.text

    @property
    def calls(self) -> Sequence[ToolCall]:
        """The calls."""
        return self._assembler.calls

    @property
    def token_ids(self) -> Sequence[int]:
        """All that was sampled."""
        return self.generation.sampled.token_ids

    @property
    def logprobs(self) -> Sequence[float]:
        """Behavior logprobs of `token_ids`."""
        return self.generation.sampled.logprobs

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]]:
        """Ids and logprobs of the likeliest tokens at each position, where they were asked for."""
        return self.generation.sampled.top

    @property
    def stop_text(self) -> str:
        """The stop text that ended it, if one did."""
        return self._assembler.stop_text

    @property
    def finish(self) -> Finish:
        """Why it ended."""
        if self.stop_text:
            return Finish.STOP_TEXT
        if self.generation.sampled.stop_reason is StopReason.LENGTH:
            return Finish.LENGTH
        return Finish.CALLS if self.calls else Finish.STOP

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Take more tokens; return what they say."""
        return self._assembler.push(token_ids)

    def close(self) -> list[Delta]:
        """Return what was held back: no more tokens come."""
        return self._assembler.finish()

    def remember(self, memory: ReplyMemory) -> None:
        """Keep the ids of a reply that ended by itself, for the session's next turn."""
        ids = self.token_ids
        if ids and ids[-1] in self._format.stop_ids and not self.stop_text:
            calls = [call.made for call in self.sent_calls]
            memory.put(self._plan.session_id, self.text, calls, ids)

    @property
    def sent_calls(self) -> list[Call]:
        """The calls as the client gets them."""
        return [sent_call(call, self._tools) for call in self.calls]

    def answered(self, client: Requester, chain: str, *, at: float) -> Answered:
        """Return what is known of a reply of at least one token."""
        sampled, plan = self.generation.sampled, self._plan
        turn = make_turn(
            self._format, plan.context_ids, sampled, plan.told, self.generation.sampling
        )
        turn = msgspec.structs.replace(turn, starts_segment=self.starts_segment)
        return Answered(
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
