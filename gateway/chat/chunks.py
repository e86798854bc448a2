"""OpenAI's response objects: `chat.completion` and the chunks of a stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.actors.policy.tokenizer import Tokenizer
from penstock.gateway.chat.generation import Generation
from penstock.gateway.chat.prompt import arguments_json
from penstock.gateway.chat.reply import Delta, ReplyAssembler, TextDelta
from penstock.gateway.chat.schema import ChatRequest, Tool
from penstock.messages.rollout import StopReason, ToolCall

_LOGPROB_MIN = -9999.0
"""Minus infinity in JSON, which has none."""
DONE = b"[DONE]"


class ReplyWriter:
    """Writes one reply, whole or as events of a stream (their `data`)."""

    def __init__(
        self,
        chat: ChatRequest,
        generation: Generation,
        tokenizer: Tokenizer,
        tools: Mapping[str, Tool],
        created: float,
    ) -> None:
        self._chat = chat
        self._generation = generation
        self._tokenizer = tokenizer
        self._tools = tools
        self._created = int(created)
        self._num_written = 0

    def whole(self, reply: ReplyAssembler) -> bytes:
        """Return the complete response."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.calls:
            message["tool_calls"] = [self._call(i, call) for i, call in enumerate(reply.calls)]
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason(reply)}
        body = self._object("chat.completion", [choice | self._token_fields()])
        return msgspec.json.encode(body | self._prompt_fields() | {"usage": self._usage()})

    def opening(self) -> bytes:
        """Return the first event: the role."""
        choice = self._choice({"role": "assistant", "content": ""})
        return msgspec.json.encode(self._chunk([choice]) | self._prompt_fields())

    def deltas(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield an event a delta; the first carries the fields of the tokens that are new."""
        fields = self._token_fields()
        for delta in deltas:
            yield msgspec.json.encode(self._chunk([self._choice(self._delta(delta)) | fields]))
            fields = {}
        if fields:
            yield msgspec.json.encode(self._chunk([self._choice({}) | fields]))

    def closing(self, reply: ReplyAssembler) -> Iterator[bytes]:
        """Yield the last events: why it ended, usage if asked for, and the end marker."""
        choice = self._choice({}) | {"finish_reason": self._finish_reason(reply)}
        yield msgspec.json.encode(self._chunk([choice]))
        options = self._chat.stream_options
        if options and options.include_usage:
            yield msgspec.json.encode(self._chunk([]) | {"usage": self._usage()})
        yield DONE

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, TextDelta):
            return {"content": delta.text}
        return {"tool_calls": [{"index": delta.index} | self._call(delta.index, delta.call)]}

    def _call(self, index: int, call: ToolCall) -> dict[str, Any]:
        arguments = arguments_json(call, self._tools[call.name])
        return {
            "id": f"call_{self._generation.request_id}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _token_fields(self) -> dict[str, Any]:
        """Return logprobs and ids, where asked for, of the tokens not written yet."""
        sampled, start = self._generation.sampled, self._num_written
        self._num_written = len(sampled.token_ids)
        fields: dict[str, Any] = {}
        if start == self._num_written:
            return fields
        ids = sampled.token_ids[start:]
        if self._chat.logprobs:
            pairs = zip(ids, sampled.logprobs[start:], strict=True)
            fields["logprobs"] = {"content": [self._logprob(i, p) for i, p in pairs]}
        if self._chat.return_token_ids:
            fields["token_ids"] = ids
        return fields

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.decode_bytes([token_id])
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(_LOGPROB_MIN, logprob),
            "bytes": list(data),
            "top_logprobs": [],
        }

    def _prompt_fields(self) -> dict[str, Any]:
        if not self._chat.return_token_ids:
            return {}
        return {"prompt_token_ids": self._generation.context_ids}

    def _usage(self) -> dict[str, int]:
        num_context = len(self._generation.context_ids)
        num_sampled = len(self._generation.sampled.token_ids)
        return {
            "prompt_tokens": num_context,
            "completion_tokens": num_sampled,
            "total_tokens": num_context + num_sampled,
        }

    def _finish_reason(self, reply: ReplyAssembler) -> str:
        if self._generation.sampled.stop_reason is StopReason.LENGTH:
            return "length"
        return "tool_calls" if reply.calls else "stop"

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._object("chat.completion.chunk", choices)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "object": kind,
            "created": self._created,
            "model": self._chat.model,
            "choices": choices,
        }

    @staticmethod
    def _choice(delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "finish_reason": None}
