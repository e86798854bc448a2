"""The loop of an episode, between a model and a checkout.

```
 instruction ─▶ chat completions (tools) ─▶ calls ─▶ Session over the checkout ─▶ results ─┐
                       ▲─────────────────────────────────────────────────────────────────────┘
```
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from penstock.envs.harness.session import Session
from penstock.envs.harness.tool_calls import ToolResult
from penstock.infra.agent.model import AgentError, Model
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.rollout import ToolCall

SAID_CHARACTERS_MAX = 400
Say = Callable[[str], None]


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


async def work(
    model: Model, session: Session, instruction: str, num_turns_max: int, say: Say
) -> AgentReport:
    """Let the model work until it finishes, answers without a call, or has used its turns."""
    report = AgentReport(harness=model.harness, session_id=model.session_id)
    try:
        await _work(model, session, instruction, num_turns_max, say, report)
    except AgentError as error:
        report.end, report.error = End.FAILED, str(error)
    return report


async def _work(  # noqa: PLR0913, PLR0917 - a conversation's two sides, its bounds and its report
    model: Model,
    session: Session,
    instruction: str,
    num_turns_max: int,
    say: Say,
    report: AgentReport,
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    for _ in range(num_turns_max):
        message = await model.reply(messages)
        report.num_turns += 1
        report.num_summaries = model.num_summaries
        requested: list[dict[str, Any]] = message.get("tool_calls") or []
        messages.append(
            {"role": "assistant", "content": message.get("content"), "tool_calls": requested}
            if requested
            else {"role": "assistant", "content": message.get("content") or ""}
        )
        if not requested:
            report.end, report.answer = End.ANSWERED, message.get("content") or ""
            return
        results = await _carry_out(session, requested, report, say)
        for one, result in zip(requested, results, strict=True):
            messages.append(
                {"role": "tool", "tool_call_id": one.get("id", ""), "content": result.text}
            )
        if any(result.is_finish for result in results):
            report.end = End.FINISHED
            return


async def _carry_out(
    session: Session, requested: list[dict[str, Any]], report: AgentReport, say: Say
) -> list[ToolResult]:
    calls = [to_call(one) for one in requested]
    results = await session.run(calls)
    report.num_calls += len(calls)
    report.num_invalid_calls += sum(not result.is_valid for result in results)
    for call, result in zip(calls, results, strict=True):
        given = " ".join(f"{name!r}={value!r}" for name, value in call.arguments.items())
        say(f"> {call.name!r} {given}"[:SAID_CHARACTERS_MAX])
        say(quoted(result.text))
    return results


def quoted(text: str) -> str:
    """Return the beginning of a text with every line indented: none passes for one of ours."""
    return "\n".join(f"  {line}" for line in text[:SAID_CHARACTERS_MAX].splitlines())


def to_call(requested: dict[str, Any]) -> ToolCall:
    """Return a call from its chat-completions form; values become the text that tools check."""
    function = requested.get("function", {})
    try:
        given = parse_json(function.get("arguments") or "{}", dict[str, Any], "arguments")
    except CodecError:
        given = {"arguments": "no JSON object"}
    arguments = {name: _as_text(value) for name, value in given.items()}
    return ToolCall(name=str(function.get("name", "")), arguments=arguments)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
