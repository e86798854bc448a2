"""What is sampled for a conversation: its context and how tokens are drawn.

Length is checked by bytes first, and long prompts are tokenized in threads, one of a key at a
time: who sends them waits for their own.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from penstock.actors.policy.chat.format import (
    ChatFormat,
    OfferedTools,
    UnrenderableError,
)
from penstock.gateway.config import GatewayConfig
from penstock.gateway.conversation import LiveRequest
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.exchange.prompt import ReplyMemory, messages_of, remembered, told_tools
from penstock.gateway.exchange.sampling import sampling_of
from penstock.gateway.exchange.session_tokens import SessionTokens, session_tokens
from penstock.messages.task import Sampling

BYTES_PER_TOKEN = 4
"""What a prompt is charged by that was not tokenized."""
INLINE_BYTES_MAX = 16 << 10
"""Longer prompts, tools included, are tokenized in a thread."""
NUM_THREADS = 2
T = TypeVar("T")


class Plan(NamedTuple):
    """One request as the generators get it, but for its choices."""

    session_id: str
    context_ids: list[int]
    sampling: Sampling
    told: OfferedTools
    chain: str = ""
    """Of the session's records, where a summary stands for its first messages."""
    is_named: bool = True
    """Whether its client names the session, which it may then continue at another gateway."""


class TokenCharge:
    """What a request costs its key, in tokens, also if it is refused."""

    def __init__(self) -> None:
        self.num_tokens = 0


class Planner:
    """Makes plans; holds the threads that tokenize."""

    def __init__(self, config: GatewayConfig, chat_format: ChatFormat) -> None:
        """Start without threads: they come with the first long prompt."""
        self.memory = ReplyMemory()
        self._config = config
        self._format = chat_format
        longest = chat_format.tokenizer.token_bytes_max
        self._prompt_bytes_max = config.context_tokens_max * longest
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        """Let the threads go; prompts that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_size(self, conversation: LiveRequest, charge: TokenCharge) -> None:
        """Refuse a prompt that is too long by its bytes alone, before anything looks at its text.

        Args:
            conversation: The request.
            charge: Gets an estimate of the prompt's tokens.

        Raises:
            ApiError: 400.

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
        session_id: str,
        seed: int,
        charge: TokenCharge,
    ) -> Plan:
        """Return what is to be sampled for a request.

        Args:
            conversation: The request.
            key_id: Whose it is: a key's long prompts are tokenized one at a time.
            session_id: Names the session whose replies are remembered.
            seed: Of the sampling, where the request names none.
            charge: Gets the prompt's tokens.

        Raises:
            ApiError: 400, the conversation does not fit the context or the format.

        """
        told = told_tools(conversation)
        context = await self._context(conversation, key_id, session_id, told)
        charge.num_tokens = len(context)
        room = self._config.context_tokens_max - len(context)
        if room < 1:
            raise _too_long(f"resulted in {len(context)} tokens", self._config.context_tokens_max)
        wanted = conversation.sampling.num_tokens_max or room
        num_reply = min(wanted, room, self._config.reply_tokens_max)
        sampling = sampling_of(conversation, self._format, num_reply, seed)
        return Plan(session_id, context, sampling, told)

    async def session(
        self, conversation: LiveRequest, *, key_id: str, charge: TokenCharge
    ) -> SessionTokens:
        """Return a finished session in tokens; arguments as `plan` has them.

        Raises:
            ApiError: 400, the session does not fit the context or the format.

        """
        told = told_tools(conversation)
        messages = messages_of(conversation)
        num_max = self._config.context_tokens_max
        found = await self._rendered(
            lambda: session_tokens(self._format, messages, told, num_max),
            conversation,
            key_id,
            told,
        )
        charge.num_tokens = found.num_tokens
        if found.num_tokens > num_max:
            raise _too_long(f"resulted in at least {found.num_tokens} tokens", num_max)
        return found

    async def _context(
        self,
        conversation: LiveRequest,
        key_id: str,
        session_id: str,
        told: OfferedTools,
    ) -> list[int]:
        prompt = conversation.prompt
        if isinstance(prompt, tuple):
            return self._checked_ids(prompt, conversation.prompt_place)
        messages = [] if prompt is not None else messages_of(conversation)
        sampled = remembered(messages, session_id, self.memory)

        def render() -> list[int]:
            if prompt is not None:
                return self._format.tokenizer.encode(prompt)
            return self._format.render_prompt(messages, told, sampled)

        return await self._rendered(render, conversation, key_id, told)

    async def _rendered(
        self,
        render: Callable[[], T],
        conversation: LiveRequest,
        key_id: str,
        told: OfferedTools,
    ) -> T:
        """Render here, or where that takes long in a thread: of a key one at a time."""
        try:
            num_bytes = _num_bytes(conversation) + len(msgspec.json.encode(told.schemas))
            if num_bytes <= INLINE_BYTES_MAX:
                return render()
            lock = self._locks.setdefault(key_id, asyncio.Lock())
            async with asyncio.timeout(self._config.request_s_max), lock:
                return await asyncio.get_running_loop().run_in_executor(self._threads, render)
        except UnrenderableError as error:
            raise invalid(str(error), "messages") from error
        except TimeoutError as error:
            text = "the prompt was not tokenized in time"
            raise ApiError(503, "overloaded", text, retry_after_s=5.0) from error

    def _checked_ids(self, ids: tuple[int, ...], place: str) -> list[int]:
        size = self._format.tokenizer.vocab_size
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < size:
                raise invalid(f"expected a token id from 0 to {size - 1}", f"{place}[{index}]")
        return list(ids)


def _num_bytes(conversation: LiveRequest) -> int:
    """Return how many bytes of text a prompt has at least, tools aside."""
    texts = [conversation.prompt] if isinstance(conversation.prompt, str) else []
    texts += [message.text for message in conversation.messages]
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    calls = [call.arguments for message in conversation.messages for call in message.calls]
    return num_bytes + (len(msgspec.json.encode(calls)) // 2 if calls else 0)


def _too_long(found: str, num_max: int) -> ApiError:
    """Return the error in OpenAI's words, by which clients know it."""
    text = (
        f"This model's maximum context length is {num_max} tokens. However, your messages {found}."
        " Please reduce the length of the messages."
    )
    return ApiError(400, "context_length_exceeded", text, "messages")
