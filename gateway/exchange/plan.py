"""Plans a request: the token ids of its context, its sampling parameters and its grammar.

Replies are not tokenized again if their sampled ids are still remembered, whatever the route by
which a conversation comes back. The next turn of a session then begins with exactly the tokens of
the last one, so that the generator's KV cache still applies.

The length of a prompt is checked in bytes before it is tokenized. Long prompts are tokenized in
threads, one at a time per key, so that a key that sends many waits for its own.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.callable import can_call
from penstock.actors.policy.chat.format import (
    ChatFormat,
    ChatMessage,
    OfferedTools,
    Role,
    UnrenderableError,
)
from penstock.actors.policy.chat.grammars import (
    after_reasoning,
    grammar_for_calls,
    grammar_for_schema,
)
from penstock.actors.policy.chat.schemas import GrammarError
from penstock.actors.policy.chat.token_kinds import reasoning_end
from penstock.actors.policy.tokenizer import UntokenizableError
from penstock.actors.runtime.fair_table import FairTable
from penstock.envs.harness.tools import prompt_for
from penstock.gateway.config import GatewayConfig
from penstock.gateway.conversation import Call, ChoiceMode, LiveRequest, RequestMessage, Tool
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.exchange.session_tokens import SessionTokens, session_tokens
from penstock.gateway.exchange.sessions import UserKey
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Grammar, Sampling

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def sampling_of(
    request: LiveRequest,
    chat_format: ChatFormat,
    num_tokens_max: int,
    seed: int,
    context_ids: Sequence[int] = (),
) -> Sampling:
    """Return the sampling parameters of a request.

    Args:
        request: The request.
        chat_format: Chat format of the policy.
        num_tokens_max: Maximum length of one reply in tokens.
        seed: Seed to use if the request sets none.
        context_ids: Ids of the prompt, which may open the reply's reasoning.

    Raises:
        ApiError: 400, the chat format does not support an option, or a token id is out of range.

    """
    wishes = request.sampling
    stops = [] if wishes.ignores_end else list(chat_format.stop_ids)
    stops += wishes.stop_token_ids
    if not request.allows_parallel_calls and request.offered:
        if chat_format.call_end_id is None:
            text = "not supported by the chat format of this model; leave it out or send true"
            raise invalid(text, "parallel_tool_calls")
        # One call at most: the token that ends the first one ends the reply.
        stops.append(chat_format.call_end_id)
    size = chat_format.tokenizer.vocab_size
    for name, ids in (("logit_bias", wishes.logit_bias), ("stop_token_ids", wishes.stop_token_ids)):
        if not all(0 <= token_id < size for token_id in ids):
            raise invalid(f"expected token ids from 0 to {size - 1}", name)
    return Sampling(
        temperature=1.0 if wishes.temperature is None else wishes.temperature,
        top_p=1.0 if wishes.top_p is None else wishes.top_p,
        top_k=max(0, wishes.top_k or 0),
        min_p=wishes.min_p or 0.0,
        presence_penalty=wishes.presence_penalty or 0.0,
        frequency_penalty=wishes.frequency_penalty or 0.0,
        repetition_penalty=wishes.repetition_penalty or 1.0,
        logit_bias=wishes.logit_bias,
        grammar=_grammar(request, chat_format, context_ids),
        num_top_logprobs=request.num_top_logprobs,
        num_tokens_max=num_tokens_max,
        seed=seed if wishes.seed is None else wishes.seed,
        stop_token_ids=tuple(stops),
    )


def _grammar(
    request: LiveRequest, chat_format: ChatFormat, context_ids: Sequence[int]
) -> Grammar | None:
    """Return the grammar that constrains a reply; None if the client asks for no format.

    It begins after the reasoning if the prompt opens one.

    Raises:
        ApiError: 400, the schema or the chat format cannot be expressed as a grammar.

    """
    closing = reasoning_end(chat_format.tokenizer, context_ids, chat_format.stop_ids)
    try:
        grammar = _grammar_of_answer(request, chat_format, is_forced=closing is None)
    except GrammarError as error:
        place, _, text = str(error).partition(": ")
        raise invalid(text or str(error), place if text else None) from error
    return after_reasoning(grammar, closing) if grammar and closing is not None else grammar


def _grammar_of_answer(
    request: LiveRequest, chat_format: ChatFormat, *, is_forced: bool
) -> Grammar | None:
    """Return the grammar of a reply after its reasoning.

    Args:
        request: The request.
        chat_format: Chat format of the policy.
        is_forced: Whether the opening of a call by name may be forced, since the reply begins with
            it.

    """
    tools = [tool.schema | {"strict": tool.is_strict} for tool in request.offered.values()]
    choice, parallel = request.tool_choice, request.allows_parallel_calls
    schema = request.response_format.json_schema or _ANY_OBJECT
    answer = schema if request.response_format.is_json else None
    if choice.mode is ChoiceMode.REQUIRED:
        if choice.name and not is_forced:
            named = [tool for tool in tools if tool["name"] == choice.name]
            return grammar_for_calls(chat_format, named, "required", parallel=False)
        name = choice.name or "required"
        return grammar_for_calls(chat_format, tools, name, parallel=parallel)
    if tools and (answer is not None or any(tool["strict"] for tool in tools)):
        return grammar_for_calls(chat_format, tools, parallel=parallel, answer=answer)
    if answer is not None:
        return grammar_for_schema(answer, where="response_format")
    return None


NUM_REMEMBERED_MAX = 16_384
"""Maximum replies whose ids are remembered."""
NUM_TOKENS_REMEMBERED_MAX = 4 << 20
"""Maximum tokens of these replies together: 16 MiB, at 4 bytes each."""
_ReplyKey = tuple[UserKey, str, str, str]


class ReplyMemory:
    """The sampled ids of recent replies, by user, session, text and calls."""

    def __init__(
        self,
        num_max: int = NUM_REMEMBERED_MAX,
        num_tokens_max: int = NUM_TOKENS_REMEMBERED_MAX,
    ) -> None:
        least = num_tokens_max // num_max  # So that tokens bound the number, too.
        self._ids: FairTable[_ReplyKey, array[int]] = FairTable(
            num_tokens_max, lambda key, _: key[0][0], weight=lambda ids: max(least, len(ids))
        )

    def put(
        self,
        owner: UserKey,
        session_id: str,
        text: str,
        calls: Sequence[ToolCall],
        token_ids: Sequence[int],
    ) -> None:
        """Remember the ids of a reply under the text and calls that its client got."""
        self._ids[_reply_key(owner, session_id, text, calls)] = array("i", token_ids)

    def get(
        self, owner: UserKey, session_id: str, text: str, calls: Sequence[ToolCall]
    ) -> list[int] | None:
        """Return the ids of a reply; None if they are not remembered."""
        ids = self._ids.get(_reply_key(owner, session_id, text, calls))
        return None if ids is None else ids.tolist()

    def forget(self, owner: UserKey) -> None:
        """Forget the replies to a user."""
        for key in [key for key in self._ids if key[0] == owner]:
            del self._ids[key]


def sent_call(call: ToolCall, tools: Mapping[str, Tool]) -> Call:
    """Return a call as the client gets it, with arguments in the types of the tool's schema."""
    return Call(name=call.name, arguments=tools[call.name].typed(call))


def messages_of(conversation: LiveRequest) -> list[ChatMessage]:
    """Return the messages in the form of the chat format, with results in the order of calls.

    Raises:
        ApiError: 400, a tool result answers no call.

    """
    messages: list[ChatMessage] = []
    sent = conversation.messages
    index = 0
    while index < len(sent):
        message = sent[index]
        calls = tuple(call.made for call in message.calls)
        messages.append(ChatMessage(role=message.role, content=message.text, calls=calls))
        index += 1
        end = index
        while end < len(sent) and sent[end].role is Role.TOOL:
            end += 1
        messages += _results(message, sent[index:end])
        index = end
    return messages


def remembered(
    messages: Sequence[ChatMessage], owner: UserKey, session_id: str, memory: ReplyMemory
) -> dict[int, list[int]]:
    """Return the sampled ids of assistant messages, by index, as far as they are remembered."""
    found: dict[int, list[int]] = {}
    for index, message in enumerate(messages):
        if message.role is Role.ASSISTANT:
            ids = memory.get(owner, session_id, message.content, message.calls)
            if ids is not None:
                found[index] = ids
    return found


def prompt_tools(conversation: LiveRequest) -> OfferedTools:
    """Return the tools as the prompt presents them.

    A client that offers all tools of one harness version gets the prompt that training used.
    Otherwise only tools without a special token of their own are described.
    """
    offered = conversation.offered
    text = prompt_for(offered)
    if text is None:
        # The policy knows tools with a special token from training, without a description.
        further = [tool for tool in offered.values() if tool.name not in special_tokens.TOOL_NAMES]
        lines = [_describe(tool) for tool in further]
        text = "Further tools:\n" + "\n".join(lines) if lines else ""
    return OfferedTools(words=text, schemas=[tool.schema for tool in offered.values()])


def _results(caller: RequestMessage, results: Sequence[RequestMessage]) -> list[ChatMessage]:
    """Return the results of a turn in the order of its calls; results without id keep theirs."""
    places = {call.call_id: index for index, call in enumerate(caller.calls) if call.call_id}
    found: dict[int, RequestMessage] = {}
    for index, result in enumerate(results):
        place = index
        if places and result.call_id:
            if result.call_id not in places:
                text = f"the message before it makes no call {result.call_id!r}"
                raise invalid(text, f"{result.place}.tool_call_id")
            place = places[result.call_id]
        if place in found:
            text = "expected one result per call, found a second one"
            raise invalid(text, f"{result.place}.tool_call_id")
        found[place] = result
    ordered = [found[place] for place in sorted(found)]
    return [ChatMessage(role=Role.TOOL, content=result.text) for result in ordered]


def _describe(tool: Tool) -> str:
    names = ", ".join(tool.properties)
    return f"{tool.name}({names}): {tool.description}"


def _reply_key(owner: UserKey, session_id: str, text: str, calls: Sequence[ToolCall]) -> _ReplyKey:
    # Sorted: clients parse arguments and may send their keys back in another order.
    plain = [(call.name, sorted(call.arguments.items())) for call in calls]
    return owner, session_id, text, msgspec.json.encode(plain).decode()


BYTES_PER_TOKEN = 4
"""Estimate by which prompts are charged that were not tokenized."""
INLINE_BYTES_MAX = 16 << 10
"""Maximum size of a prompt, tools included, that is tokenized on the event loop."""
NUM_THREADS = 2
"""Threads that tokenize long prompts."""
T = TypeVar("T")


class Plan(NamedTuple):
    """A request as the generators get it; its choices differ only in the seed."""

    owner: UserKey
    session_id: str
    context_ids: list[int]
    sampling: Sampling
    tools: OfferedTools
    """Tools as the prompt presents them."""
    chain: str = ""
    """Chain that the reply continues, if a summary replaces the first messages; else empty."""
    is_named: bool = True
    """Whether the client names the session, and may thus continue it at another gateway."""


class TokenCharge:
    """Tokens to charge to the key of a request, whether it is answered or refused."""

    def __init__(self) -> None:
        self.num_tokens = 0


class Planner:
    """Makes plans, and owns the threads that tokenize long prompts."""

    def __init__(self, config: GatewayConfig, chat_format: ChatFormat) -> None:
        """Prepare; threads start with the first long prompt."""
        self.memory = ReplyMemory()
        self._config = config
        self._format = chat_format
        # A prompt with more bytes cannot fit the window, even if all its tokens are the longest.
        longest = chat_format.tokenizer.token_bytes_max
        self._prompt_bytes_max = config.context_tokens_max * longest
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        # Weak: the lock of a key goes when none of its requests waits any longer.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        """Stop the threads; prompts that still wait for one are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_size(self, conversation: LiveRequest, charge: TokenCharge) -> None:
        """Refuse a prompt whose size in bytes shows that it cannot fit, before any work on it.

        Args:
            conversation: The request.
            charge: Gets an estimate of the prompt's tokens.

        Raises:
            ApiError: 400, the prompt is too long.

        """
        num_bytes = _num_bytes(conversation)
        charge.num_tokens = num_bytes // BYTES_PER_TOKEN
        if num_bytes > self._prompt_bytes_max:
            least = num_bytes * self._config.context_tokens_max // self._prompt_bytes_max
            text = f"resulted in at least {least} tokens"
            raise _too_long(text, self._config.context_tokens_max)

    async def plan(
        self,
        conversation: LiveRequest,
        *,
        key_id: str,
        session: tuple[UserKey, str],
        seed: int,
        charge: TokenCharge,
    ) -> Plan:
        """Return the plan of a request.

        Args:
            conversation: The request.
            key_id: Id of the key; long prompts of one key are tokenized one at a time.
            session: User and pseudonym of the session, whose replies may be remembered.
            seed: Seed to use if the request sets none.
            charge: Gets the number of tokens of the prompt.

        Raises:
            ApiError: 400, the conversation does not fit the context window or the chat format.

        """
        tools = prompt_tools(conversation)
        self._check_names(conversation)
        context = await self._context(conversation, key_id, session, tools)
        charge.num_tokens = len(context)
        room = self._config.context_tokens_max - len(context)
        if room < 1:
            raise _too_long(f"resulted in {len(context)} tokens", self._config.context_tokens_max)
        requested = conversation.sampling.num_tokens_max or room
        num_reply = min(requested, room, self._config.reply_tokens_max)
        sampling = sampling_of(conversation, self._format, num_reply, seed, context)
        return Plan(*session, context, sampling, tools)

    async def session(
        self, conversation: LiveRequest, *, key_id: str, charge: TokenCharge
    ) -> SessionTokens:
        """Return a finished session as tokens.

        Args:
            conversation: Messages and tools of the session.
            key_id: Id of the key; long sessions of one key are tokenized one at a time.
            charge: Gets the number of tokens of the session.

        Raises:
            ApiError: 400, the session does not fit the context window or the chat format.

        """
        tools = prompt_tools(conversation)
        messages = messages_of(conversation)
        malformed = [
            index
            for index, message in enumerate(conversation.messages)
            if any(call.is_malformed for call in message.calls)
        ]
        num_max = self._config.context_tokens_max
        found = await self._rendered(
            lambda: session_tokens(self._format, messages, tools, num_max, malformed),
            conversation,
            key_id,
            tools,
        )
        charge.num_tokens = found.num_tokens
        if found.num_tokens > num_max:
            raise _too_long(f"resulted in at least {found.num_tokens} tokens", num_max)
        return found

    async def _context(
        self,
        conversation: LiveRequest,
        key_id: str,
        session: tuple[UserKey, str],
        tools: OfferedTools,
    ) -> list[int]:
        prompt = conversation.prompt
        if isinstance(prompt, tuple):
            return self._checked_ids(prompt, conversation.prompt_place)
        messages = [] if prompt is not None else messages_of(conversation)
        sampled = remembered(messages, *session, self.memory)

        def render() -> list[int]:
            if prompt is not None:
                return self._format.tokenizer.encode(prompt)
            return self._format.render_prompt(messages, tools, sampled)

        return await self._rendered(render, conversation, key_id, tools)

    async def _rendered(
        self,
        render: Callable[[], T],
        conversation: LiveRequest,
        key_id: str,
        tools: OfferedTools,
    ) -> T:
        """Render on the event loop if the prompt is short, else in a thread, one per key."""
        try:
            num_bytes = _num_bytes(conversation) + len(msgspec.json.encode(tools.schemas))
            if num_bytes <= INLINE_BYTES_MAX:
                return render()
            # Without the lock, one key with many long prompts would take all threads.
            lock = self._locks.setdefault(key_id, asyncio.Lock())
            async with asyncio.timeout(self._config.request_s_max), lock:
                return await asyncio.get_running_loop().run_in_executor(self._threads, render)
        except (UnrenderableError, UntokenizableError) as error:
            raise invalid(str(error), "messages") from error
        except TimeoutError as error:
            text = "the prompt was not tokenized in time"
            raise ApiError(503, "overloaded", text, retry_after_s=5.0) from error

    def _check_names(self, conversation: LiveRequest) -> None:
        """Refuse tools that the chat format cannot call: their calls would arrive as text."""
        for name, tool in conversation.offered.items():
            if not can_call(self._format, name, tuple(tool.properties)):
                text = "this model's chat format cannot write calls with these names"
                raise invalid(f"{name!r}: {text}", "tools")

    def _checked_ids(self, ids: tuple[int, ...], place: str) -> list[int]:
        size = self._format.tokenizer.vocab_size
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < size:
                raise invalid(f"expected a token id from 0 to {size - 1}", f"{place}[{index}]")
        return list(ids)


def _num_bytes(conversation: LiveRequest) -> int:
    """Return a lower bound of the bytes of a prompt, without its tools."""
    texts = [conversation.prompt] if isinstance(conversation.prompt, str) else []
    texts += [message.text for message in conversation.messages]
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    calls = [call.arguments for message in conversation.messages for call in message.calls]
    # Half: JSON adds quotes and escapes that the chat format may do without.
    return num_bytes + (len(msgspec.json.encode(calls)) // 2 if calls else 0)


def _too_long(found: str, num_max: int) -> ApiError:
    """Return the error for a prompt that is too long."""
    # OpenAI's wording: clients match on it to shorten the conversation.
    text = (
        f"This model's maximum context length is {num_max} tokens. However, your messages {found}."
        " Please reduce the length of the messages."
    )
    return ApiError(400, "context_length_exceeded", text, "messages")
