"""The loop of an episode, between a model and a folder: `penstock agent` and `penstock chat`.

```
 instruction ─▶ chat completions (tools) ─▶ calls ─▶ ToolSession over the checkout ─▶ results ─┐
                       ▲─────────────────────────────────────────────────────────────────────┘
```
"""

from enum import StrEnum
from typing import Any

import msgspec

from penstock.envs.harness.session import ToolSession
from penstock.envs.harness.tool_calls import ToolResult
from penstock.infra.agent.display import Display
from penstock.infra.agent.model import Model
from penstock.infra.agent.stream import AgentError, ReplyCall
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.rollout import ToolCall


class End(StrEnum):
    """How an agent's work ended."""

    FINISHED = "finished"
    ANSWERED = "answered"
    """It wrote an answer and called nothing: no tool of its own ended the work."""
    TURN_LIMIT = "turn_limit"
    FAILED = "failed"
    """The model's endpoint refused or did not answer."""


class AgentReport(msgspec.Struct, kw_only=True):
    """How an agent's work went."""

    end: End = End.TURN_LIMIT
    num_turns: int = 0
    num_calls: int = 0
    num_invalid_calls: int = 0
    num_summaries: int = 0
    """Times that the session outgrew the model's window and went on from a summary."""
    answer: str = ""
    error: str = ""
    harness: str = ""
    session_id: str = ""
    tests_passed: bool | None = None
    diff_kept: float | None = None
    """Share of the changed lines that are still as the agent left them."""
    feedback: dict[str, float] = {}
    """Signals that the service took."""
    feedback_refused: str = ""


class Dialogue:
    """A model, its tools, and all that was said; the user speaks with `ask`, any number of times.

    What was said always ends where the user may speak: a turn counts once its calls have results.
    """

    def __init__(self, model: Model, session: ToolSession, display: Display) -> None:
        self._model, self._session, self._display = model, session, display
        self._messages: list[dict[str, Any]] = []
        self.report = AgentReport(harness=model.harness, session_id=model.session_id)

    async def ask(self, instruction: str, num_turns_max: int) -> AgentReport:
        """Let the model work until it finishes, answers without a call, or has used its turns.

        A cancelled one leaves what is whole.
        """
        self._messages.append({"role": "user", "content": instruction})
        self.report.end, self.report.error = End.TURN_LIMIT, ""
        try:
            for _ in range(num_turns_max):
                if (end := await self._turn()) is not None:
                    self.report.end = end
                    break
        except AgentError as error:
            self.report.end, self.report.error = End.FAILED, str(error)
        finally:
            self._display.end_message()
            if self._messages[-1]["role"] == "user":  # Nobody answered it.
                self._messages.pop()
        return self.report

    async def _turn(self) -> End | None:
        reply = await self._model.reply(self._messages, self._display.hear)
        self._display.end_message()
        self.report.num_turns += 1
        self.report.num_summaries = self._model.num_summaries
        if not reply.tool_calls:
            self.report.answer = reply.content or ""
            self._messages.append({"role": "assistant", "content": self.report.answer})
            return End.ANSWERED
        results = await self._carry_out(reply.tool_calls)
        self._messages.append(msgspec.to_builtins(reply) | {"role": "assistant"})
        for one, result in zip(reply.tool_calls, results, strict=True):
            self._messages.append({"role": "tool", "tool_call_id": one.id, "content": result.text})
        return End.FINISHED if any(result.is_finish for result in results) else None

    async def _carry_out(self, requested: list[ReplyCall]) -> list[ToolResult]:
        calls = [to_call(one) for one in requested]
        results = await self._session.run(calls)
        self.report.num_calls += len(calls)
        self.report.num_invalid_calls += sum(not result.is_valid for result in results)
        for call, result in zip(calls, results, strict=True):
            self._display.show_call(call, result)
        return results


def to_call(requested: ReplyCall) -> ToolCall:
    """Return a call from its chat-completions form; values become the text that tools check."""
    function = requested.function
    try:
        given = parse_json(function.arguments or "{}", dict[str, Any], "arguments")
    except CodecError:
        given = {"arguments": "no JSON object"}
    arguments = {name: _as_text(value) for name, value in given.items()}
    return ToolCall(name=function.name, arguments=arguments)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
