"""Anthropic's `message` objects, and the events of a stream of one."""

from collections.abc import Iterator, Sequence
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
from penstock.gateway.errors import ANTHROPIC_PATH, ApiError, error_body
from penstock.messages.rollout import ToolCall

_STOP_REASONS = {
    Finish.STOP: "end_turn",
    Finish.STOP_TEXT: "stop_sequence",
    Finish.LENGTH: "max_tokens",
    Finish.CALLS: "tool_use",
}


class MessagesReplyWriter:
    """Writes one message, whole or block by block."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._num_blocks = 0
        self._is_text_open = False

    def whole(self, replies: Sequence[Replied]) -> bytes:
        """Return the complete message."""
        (reply,) = replies
        content: list[dict[str, Any]] = []
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        for index, call in enumerate(reply.calls):
            arguments = self._opening.conversation.offered[call.name].typed(call)
            content.append(self._call(reply, index, call) | {"input": arguments})
        body = self._message(len(reply.token_ids)) | self._stopped(reply)
        return msgspec.json.encode(body | {"content": content})

    def begin(self) -> Iterator[bytes]:
        """Yield `message_start`."""
        yield _event("message_start", message=self._message())

    def deltas(self, reply: Replied, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield the blocks of new text and calls."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                if not self._is_text_open:
                    self._is_text_open = True
                    yield self._start({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": delta.text})
            else:
                yield from self._close_text()
                yield self._start(self._call(reply, delta.index, delta.call) | {"input": {}})
                arguments = self._arguments(delta.call)
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
                yield self._stop()

    def end(self, replies: Sequence[Replied]) -> Iterator[bytes]:
        """Yield `message_delta` and `message_stop`."""
        (reply,) = replies
        yield from self._close_text()
        usage = {"output_tokens": len(reply.token_ids)}
        yield _event("message_delta", delta=self._stopped(reply), usage=usage)
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yield `error`."""
        yield sse(error_body(error, ANTHROPIC_PATH), event="error")

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self) -> bytes:
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        return _event("content_block_stop", index=index)

    def _close_text(self) -> Iterator[bytes]:
        if self._is_text_open:
            self._is_text_open = False
            yield self._stop()

    def _call(self, reply: Replied, index: int, call: ToolCall) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id(reply.request_id, index), "name": call.name}

    def _arguments(self, call: ToolCall) -> str:
        return self._opening.conversation.offered[call.name].arguments_json(call)

    def _message(self, num_sampled: int = 0) -> dict[str, Any]:
        return {
            "id": self._opening.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._opening.conversation.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(self._opening.context_ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": num_sampled,
            },
        }

    @staticmethod
    def _stopped(reply: Replied) -> dict[str, Any]:
        sequence = reply.stop_text or None
        return {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": sequence}


def _event(kind: str, **fields: Any) -> bytes:
    return sse(msgspec.json.encode({"type": kind} | fields), event=kind)
