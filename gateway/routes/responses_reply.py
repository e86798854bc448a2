"""OpenAI's `response` objects, and the events of a stream of one."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.gateway.conversation import (
    ChoiceMode,
    Delta,
    Finish,
    Opening,
    Replied,
    TextDelta,
    call_id,
    sse,
)
from penstock.gateway.errors import ApiError
from penstock.messages.rollout import ToolCall


class ResponsesReplyWriter:
    """Writes one response; items come in the order in which the policy made them."""

    def __init__(self, opening: Opening, *, custom: frozenset[str], instructions: str) -> None:
        """Begin a response.

        Args:
            opening: What is known of it.
            custom: Names of tools that take a free text.
            instructions: As the client sent them.

        """
        self._opening = opening
        self._custom = custom
        self._instructions = instructions
        self._items: list[dict[str, Any]] = []
        self._text: str | None = None
        """Of the message that is open."""
        self._num_events = 0

    def whole(self, replies: Sequence[Replied]) -> bytes:
        """Return the complete response."""
        (reply,) = replies
        if reply.text or not reply.calls:
            self._items.append(self._message(reply.text, "completed"))
        self._items += [self._call(reply, i, call) for i, call in enumerate(reply.calls)]
        return msgspec.json.encode(self._ended(reply))

    def begin(self) -> Iterator[bytes]:
        """Yield `response.created` and `response.in_progress`."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def deltas(self, reply: Replied, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield the events of new text and calls."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                yield from self._more_text(delta.text)
            else:
                yield from self._close_text()
                yield from self._whole_call(self._call(reply, delta.index, delta.call))

    def end(self, replies: Sequence[Replied]) -> Iterator[bytes]:
        """Yield `response.completed` or `response.incomplete`."""
        (reply,) = replies
        if not self._items and self._text is None:
            yield from self._more_text("")
        yield from self._close_text()
        ended = self._ended(reply)
        yield self._event(f"response.{ended['status']}", response=ended)

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yield `response.failed`."""
        fault = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response=self._response("failed") | {"error": fault})

    def _more_text(self, text: str) -> Iterator[bytes]:
        place = {"item_id": self._item_id("msg"), "output_index": len(self._items)}
        if self._text is None:
            self._text = ""
            item = self._message("", "in_progress")
            item["content"] = []
            added = "response.output_item.added"
            yield self._event(added, output_index=len(self._items), item=item)
            part = _text_part("")
            yield self._event("response.content_part.added", **place, content_index=0, part=part)
        self._text += text
        if text:
            yield self._event(
                "response.output_text.delta", **place, content_index=0, delta=text, logprobs=[]
            )

    def _close_text(self) -> Iterator[bytes]:
        if self._text is None:
            return
        text, self._text = self._text, None
        place = {"item_id": self._item_id("msg"), "output_index": len(self._items)}
        yield self._event(
            "response.output_text.done", **place, content_index=0, text=text, logprobs=[]
        )
        part = _text_part(text)
        yield self._event("response.content_part.done", **place, content_index=0, part=part)
        yield self._item_done(self._message(text, "completed"))

    def _whole_call(self, item: dict[str, Any]) -> Iterator[bytes]:
        is_custom = item["type"] == "custom_tool_call"
        field = "input" if is_custom else "arguments"
        kind = "custom_tool_call_input" if is_custom else "function_call_arguments"
        place = {"item_id": item["id"], "output_index": len(self._items)}
        begun = item | {field: "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
        yield self._event(f"response.{kind}.delta", **place, delta=item[field])
        yield self._event(
            f"response.{kind}.done", **place, name=item["name"], **{field: item[field]}
        )
        yield self._item_done(item)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        index = len(self._items)
        self._items.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        body = {"type": kind, "sequence_number": number} | fields
        return sse(msgspec.json.encode(body), event=kind)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._opening.request_id}_{len(self._items)}"

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id("msg"),
            "status": status,
            "role": "assistant",
            "content": [_text_part(text)],
        }

    def _call(self, reply: Replied, index: int, call: ToolCall) -> dict[str, Any]:
        names = {"call_id": call_id(reply.request_id, index), "name": call.name}
        if call.name in self._custom:
            text = call.arguments.get("input", "")
            item = {"type": "custom_tool_call", "id": self._item_id("ctc"), "input": text}
        else:
            arguments = self._opening.conversation.offered[call.name].arguments_json(call)
            item = {"type": "function_call", "id": self._item_id("fc"), "arguments": arguments}
        return item | names | {"status": "completed"}

    def _ended(self, reply: Replied) -> dict[str, Any]:
        num_context, num_sampled = len(self._opening.context_ids), len(reply.token_ids)
        is_cut = reply.finish is Finish.LENGTH
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": num_context,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_context + num_sampled,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._opening.conversation
        choice, wishes = asked.tool_choice, asked.sampling
        is_named = choice.mode is ChoiceMode.REQUIRED and choice.name
        return {
            "id": self._opening.request_id,
            "object": "response",
            "created_at": int(self._opening.created),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._instructions or None,
            "max_output_tokens": wishes.num_tokens_max,
            "metadata": asked.metadata,
            "model": asked.model,
            "output": list(self._items),
            "parallel_tool_calls": asked.allows_parallel_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": asked.store,
            "temperature": 1.0 if wishes.temperature is None else wishes.temperature,
            "text": {"format": _format(asked.response_format.is_json)},
            "tool_choice": {"type": "function", "name": choice.name} if is_named else choice.mode,
            "tools": [{"type": "function", "strict": None} | tool.schema for tool in asked.tools],
            "top_p": 1.0 if wishes.top_p is None else wishes.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _format(is_json: bool) -> dict[str, Any]:
    return {"type": "json_object" if is_json else "text"}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
