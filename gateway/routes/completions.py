"""`POST /v1/completions`: continues a text or token ids, in OpenAI's legacy format."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.gateway.conversation import (
    NUM_CHOICES_MAX,
    Delta,
    LiveReply,
    LiveRequest,
    Opening,
    ParsedRequest,
    TextDelta,
    sse,
)
from penstock.gateway.errors import ApiError, error_body, invalid
from penstock.gateway.routes.body import SamplingFields, check_sampling, read_body
from penstock.gateway.routes.chat import (
    FINISH_REASONS,
    LOGPROB_MIN,
    StreamOptions,
    stop_field,
    usage,
)

NUM_TOKENS_DEFAULT = 16
"""Maximum length of a reply if the request sets none, as in OpenAI's API."""
_NUM_LOGPROBS_MAX = 5
"""Maximum alternatives per token, as in OpenAI's API."""


class CompletionsBody(SamplingFields, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`: the fields that have an effect or are refused."""

    model: str
    prompt: str | list[Any]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int = NUM_TOKENS_DEFAULT
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool = False
    suffix: str = ""
    user: str = ""
    safety_identifier: str = ""
    metadata: dict[str, str] = {}
    store: bool = True


def read_completions(body: bytes) -> ParsedRequest:
    """Parse a completions body.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    read, ignored = read_body(body, CompletionsBody)
    if not 1 <= read.n <= NUM_CHOICES_MAX:
        raise invalid(f"expected 1 to {NUM_CHOICES_MAX}", "n")
    if read.best_of not in {None, read.n}:
        raise invalid("expected the same number as n", "best_of")
    if read.echo:
        raise invalid("replies cannot repeat the prompt; leave the field out", "echo")
    if read.suffix:
        raise invalid("this model cannot fill in before a suffix; leave the field out", "suffix")
    if not 0 <= (read.logprobs or 0) <= _NUM_LOGPROBS_MAX:
        raise invalid(f"expected 0 to {_NUM_LOGPROBS_MAX}", "logprobs")
    wishes = read.wishes(read.max_tokens)
    conversation = LiveRequest(
        model=read.model,
        prompt=_prompt(read.prompt),
        sampling=check_sampling(wishes, {"num_tokens_max": "max_tokens", "stops": "stop"}),
        num_choices=read.n,
        num_top_logprobs=read.logprobs or 0,
        is_streamed=read.stream,
        user=read.safety_identifier or read.user or read.metadata.get("user_id", ""),
        store=read.store,
        metadata=read.metadata,
    )
    has_usage = bool(read.stream_options and read.stream_options.include_usage)
    writer = partial(
        CompletionsReplyWriter, has_logprobs=read.logprobs is not None, has_usage=has_usage
    )
    return ParsedRequest(conversation, writer, ignored)


def _prompt(given: str | list[Any]) -> str | tuple[int, ...]:
    """Return the prompt; a list that holds only one prompt stands for that prompt."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        (given,) = given
    if isinstance(given, str):
        return given
    # Not isinstance: true and false would pass as token ids.
    if not given or any(type(token_id) is not int for token_id in given):
        text = "expected one prompt: a text, or a list of token ids"
        raise invalid(text, "prompt")
    return tuple(given)


class CompletionsReplyWriter:
    """Serializes the replies of one completions request, whole or as a stream."""

    def __init__(self, opening: Opening, *, has_logprobs: bool, has_usage: bool) -> None:
        self._opening = opening
        self._has_logprobs = has_logprobs
        self._has_usage = has_usage
        self._num_written: dict[int, int] = {}

    def whole(self, replies: Sequence[LiveReply]) -> bytes:
        """Return the complete response."""
        choices = [self._choice(reply, reply.text, is_last=True) for reply in replies]
        body = self._object(choices) | {"usage": usage(self._opening, replies)}
        return msgspec.json.encode(body)

    def begin(self) -> Iterator[bytes]:
        """Yield nothing: the stream begins with the first text."""
        return iter(())

    def deltas(self, reply: LiveReply, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield an event for new text."""
        text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        if text:
            choice = self._choice(reply, text, is_last=False)
            yield sse(msgspec.json.encode(self._object([choice])))

    def end(self, replies: Sequence[LiveReply]) -> Iterator[bytes]:
        """Yield the finish reason of each choice, the usage if requested, and the end marker."""
        for reply in replies:
            choice = self._choice(reply, "", is_last=True)
            yield sse(msgspec.json.encode(self._object([choice])))
        if self._has_usage:
            body = self._object([]) | {"usage": usage(self._opening, replies)}
            yield sse(msgspec.json.encode(body))
        yield sse(b"[DONE]")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yield the error; a failed stream has no end marker."""
        yield sse(error_body(error))

    def _choice(self, reply: LiveReply, text: str, *, is_last: bool) -> dict[str, Any]:
        reason = FINISH_REASONS[reply.finish] if is_last else None
        choice: dict[str, Any] = {"index": reply.index, "text": text, "finish_reason": reason}
        choice["logprobs"] = self._logprobs(reply) if self._has_logprobs else None
        return choice | (stop_field(reply) if is_last else {})

    def _logprobs(self, reply: LiveReply) -> dict[str, Any]:
        """Return the logprobs of tokens not written yet."""
        start = self._num_written.get(reply.index, 0)
        self._num_written[reply.index] = len(reply.token_ids)
        decode = self._opening.tokenizer.decode
        return {
            "tokens": [decode([token_id]) for token_id in reply.token_ids[start:]],
            "token_logprobs": [max(LOGPROB_MIN, logprob) for logprob in reply.logprobs[start:]],
            "top_logprobs": [
                {decode([token_id]): max(LOGPROB_MIN, logprob) for token_id, logprob in row}
                for row in reply.top_logprobs[start:]
            ]
            or None,
            "text_offset": [],
        }

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._opening.request_id,
            "object": "text_completion",
            "created": int(self._opening.created),
            "model": self._opening.conversation.model,
            "choices": choices,
        }
