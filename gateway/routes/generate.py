"""`POST /inference/v1/generate`: token ids in, token ids out, in vLLM's format."""

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
    SamplingOptions,
    sse,
)
from penstock.gateway.errors import ApiError, error_body, invalid
from penstock.gateway.routes.body import SamplingFields, check_sampling, read_body
from penstock.gateway.routes.chat import FINISH_REASONS, LOGPROB_MIN, logprob_entries

NUM_TOKENS_DEFAULT = 16
"""Maximum length of a reply if the request sets none, as in vLLM."""
NUM_LOGPROBS_MAX = 20
"""Maximum alternatives per token, as in vLLM."""
_PLACE = "sampling_params"


class GenerateSampling(SamplingFields, frozen=True, kw_only=True):
    """vLLM's `SamplingParams`: the fields that have an effect or are refused."""

    n: int = 1
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int | None = None


class GenerateBody(msgspec.Struct, frozen=True):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: GenerateSampling = GenerateSampling()
    model: str = ""
    stream: bool = False
    user: str = ""
    metadata: dict[str, str] = {}
    store: bool = True


def read_generate(body: bytes) -> ParsedRequest:
    """Parse a generate body.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    read, ignored = read_body(body, GenerateBody)
    params = read.sampling_params
    if not read.token_ids:
        raise invalid("expected at least one token id", "token_ids")
    if not 1 <= params.n <= NUM_CHOICES_MAX:
        raise invalid(f"expected 1 to {NUM_CHOICES_MAX}", f"{_PLACE}.n")
    if not 0 <= (params.logprobs or 0) <= NUM_LOGPROBS_MAX:
        raise invalid(f"expected 0 to {NUM_LOGPROBS_MAX}", f"{_PLACE}.logprobs")
    for name in ("prompt_logprobs", "min_tokens"):
        if getattr(params, name):
            raise invalid("not supported; leave the field out", f"{_PLACE}.{name}")
    num_tokens_max = NUM_TOKENS_DEFAULT if params.max_tokens is None else params.max_tokens
    wishes = params.wishes(num_tokens_max, ignores_end=params.ignore_eos)
    # Errors must name the field where the body has it, inside `sampling_params`.
    names = {name: f"{_PLACE}.{name}" for name in SamplingOptions.__struct_fields__}
    names |= {"num_tokens_max": f"{_PLACE}.max_tokens", "stops": f"{_PLACE}.stop"}
    conversation = LiveRequest(
        model=read.model,
        prompt=tuple(read.token_ids),
        prompt_place="token_ids",
        sampling=check_sampling(wishes, names),
        num_choices=params.n,
        num_top_logprobs=params.logprobs or 0,
        is_streamed=read.stream,
        user=read.user or read.metadata.get("user_id", ""),
        store=read.store,
        metadata=read.metadata,
    )
    writer = partial(GenerateReplyWriter, has_logprobs=params.logprobs is not None)
    return ParsedRequest(conversation, writer, ignored)


class GenerateReplyWriter:
    """Serializes the token ids of one request's replies, whole or as a stream."""

    def __init__(self, opening: Opening, *, has_logprobs: bool) -> None:
        self._opening = opening
        self._has_logprobs = has_logprobs
        self._num_written: dict[int, int] = {}

    def whole(self, replies: Sequence[LiveReply]) -> bytes:
        """Return the complete response."""
        return self._body([self._choice(reply, is_last=True) for reply in replies])

    def begin(self) -> Iterator[bytes]:
        """Yield nothing: the stream begins with the first ids."""
        return iter(())

    def deltas(self, reply: LiveReply, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield an event with the ids that are not written yet."""
        if len(reply.token_ids) > self._num_written.get(reply.index, 0):
            yield sse(self._body([self._choice(reply, is_last=False)]))

    def end(self, replies: Sequence[LiveReply]) -> Iterator[bytes]:
        """Yield the finish reason of each choice, and the end marker."""
        for reply in replies:
            yield sse(self._body([self._choice(reply, is_last=True)]))
        yield sse(b"[DONE]")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yield the error; a failed stream has no end marker."""
        yield sse(error_body(error))

    def _choice(self, reply: LiveReply, *, is_last: bool) -> dict[str, Any]:
        start = self._num_written.get(reply.index, 0)
        self._num_written[reply.index] = len(reply.token_ids)
        ids = list(reply.token_ids[start:])
        logprobs = None
        if self._has_logprobs:
            logprobs = {"content": logprob_entries(reply, start, _entry)}
        reason = FINISH_REASONS[reply.finish] if is_last else None
        return {
            "index": reply.index,
            "token_ids": ids,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _body(self, choices: list[dict[str, Any]]) -> bytes:
        body = {"request_id": self._opening.request_id, "choices": choices}
        return msgspec.json.encode(body | {"prompt_logprobs": None})


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    logprob = max(LOGPROB_MIN, logprob)
    return {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None}
