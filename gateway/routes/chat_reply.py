"""OpenAI's response objects: `chat.completion` and the chunks of a stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.gateway.conversation import (
    Delta,
    Finish,
    Opening,
    Replied,
    TextDelta,
    call_id,
    sse,
)
from penstock.gateway.errors import ApiError, error_body
from penstock.messages.rollout import ToolCall

_NOTHING: Mapping[str, Any] = {}
LOGPROB_MIN = -9999.0
"""Minus infinity in JSON, which has none."""
FINISH_REASONS = {
    Finish.STOP: "stop",
    Finish.STOP_TEXT: "stop",
    Finish.LENGTH: "length",
    Finish.CALLS: "tool_calls",
}


class ChatReplyWriter:
    """Writes the replies of one request, whole or as events of a stream."""

    def __init__(
        self, opening: Opening, *, has_logprobs: bool, has_token_ids: bool, has_usage: bool
    ) -> None:
        self._opening = opening
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids
        self._has_usage = has_usage
        self._num_written: dict[int, int] = {}

    def whole(self, replies: Sequence[Replied]) -> bytes:
        """Return the complete response."""
        body = self._object("chat.completion", [self._choice_of(reply) for reply in replies])
        body |= self._prompt_fields() | {"usage": usage(self._opening, replies)}
        return msgspec.json.encode(body)

    def begin(self) -> Iterator[bytes]:
        """Yield the first events: the role of each choice."""
        for index in range(self._opening.conversation.num_choices):
            choice = self._delta_choice(index, {"role": "assistant", "content": ""})
            yield self._event([choice], self._prompt_fields() if index == 0 else {})

    def deltas(self, reply: Replied, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield an event a delta; the first carries the fields of the tokens that are new."""
        fields = self._token_fields(reply)
        for delta in deltas:
            yield self._event([self._delta_choice(reply.index, self._delta(reply, delta)) | fields])
            fields = {}
        if fields:
            yield self._event([self._delta_choice(reply.index, {}) | fields])

    def end(self, replies: Sequence[Replied]) -> Iterator[bytes]:
        """Yield the last events: why each ended, usage if asked for, and the end marker."""
        for reply in replies:
            reason = {"finish_reason": FINISH_REASONS[reply.finish]}
            yield self._event([self._delta_choice(reply.index, {}) | reason | stop_field(reply)])
        if self._has_usage:
            yield self._event([], {"usage": usage(self._opening, replies)})
        yield sse(b"[DONE]")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yield the error, after which there is no end marker."""
        yield sse(error_body(error))

    def _choice_of(self, reply: Replied) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.calls:
            message["tool_calls"] = [
                self._call(reply, index, call) for index, call in enumerate(reply.calls)
            ]
        reason = FINISH_REASONS[reply.finish]
        choice = {"index": reply.index, "message": message, "finish_reason": reason}
        return choice | stop_field(reply) | self._token_fields(reply) | self._reply_id(reply)

    def _reply_id(self, reply: Replied) -> dict[str, str]:
        """Return the id for feedback on one of several choices."""
        is_single = self._opening.conversation.num_choices == 1
        return {} if is_single else {"request_id": reply.request_id}

    def _delta(self, reply: Replied, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, TextDelta):
            return {"content": delta.text}
        call = self._call(reply, delta.index, delta.call)
        return {"tool_calls": [{"index": delta.index} | call]}

    def _call(self, reply: Replied, index: int, call: ToolCall) -> dict[str, Any]:
        tool = self._opening.conversation.offered[call.name]
        return {
            "id": call_id(reply.request_id, index),
            "type": "function",
            "function": {"name": call.name, "arguments": tool.arguments_json(call)},
        }

    def _token_fields(self, reply: Replied) -> dict[str, Any]:
        """Return logprobs and ids, where asked for, of the tokens not written yet."""
        start = self._num_written.get(reply.index, 0)
        self._num_written[reply.index] = len(reply.token_ids)
        ids = list(reply.token_ids[start:])
        fields: dict[str, Any] = {}
        if not ids:
            return fields
        if self._has_logprobs:
            fields["logprobs"] = {"content": logprob_entries(reply, start, self._entry)}
        if self._has_token_ids:
            fields["token_ids"] = ids
        return fields

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._opening.tokenizer.decode_bytes([token_id])
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(LOGPROB_MIN, logprob),
            "bytes": list(data),
        }

    def _prompt_fields(self) -> dict[str, Any]:
        if not self._has_token_ids:
            return {}
        return {"prompt_token_ids": list(self._opening.context_ids)}

    def _event(self, choices: list[dict[str, Any]], fields: Mapping[str, Any] = _NOTHING) -> bytes:
        return sse(
            msgspec.json.encode(self._object("chat.completion.chunk", choices) | dict(fields))
        )

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._opening.request_id,
            "object": kind,
            "created": int(self._opening.created),
            "model": self._opening.conversation.model,
            "choices": choices,
        }

    def _delta_choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": None}


def logprob_entries(
    reply: Replied, start: int, entry: Callable[[int, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the entries of a reply's tokens from `start` on, each with its likeliest tokens."""
    top = reply.top_logprobs
    return [
        entry(token_id, logprob)
        | {"top_logprobs": [entry(*one) for one in top[index]] if index < len(top) else []}
        for index, (token_id, logprob) in enumerate(
            zip(reply.token_ids, reply.logprobs, strict=True)
        )
        if index >= start
    ]


def usage(opening: Opening, replies: Sequence[Replied]) -> dict[str, int]:
    """Return OpenAI's usage object; the prompt counts once."""
    num_context = len(opening.context_ids)
    num_sampled = sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": num_context,
        "completion_tokens": num_sampled,
        "total_tokens": num_context + num_sampled,
    }


def stop_field(reply: Replied) -> dict[str, str]:
    """Return vLLM's field of the text that ended a reply."""
    return {"stop_reason": reply.stop_text} if reply.finish is Finish.STOP_TEXT else {}
