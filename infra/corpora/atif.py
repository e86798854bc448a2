"""Trajectories in ATIF, the Agent Trajectory Interchange Format, to and from conversations.

```
 trajectory.json: steps of user, agent and system  <──▶  messages of a `ChatTrace`
   an agent's step: message, tool_calls, observation <──▶ assistant's message, results of its calls
```
Reading leaves out what a conversation has no place for (metrics, reasoning, images, sub-agents),
and reads only the new part of a copied context.

Source: ATIF 1.7 (Harbor's RFC 0001).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from penstock.infra.corpora.traces_format import ChatTrace, TraceCall, TraceFunction, TraceMessage
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.parsing import parse_json

VERSION = "ATIF-v1.7"
SUFFIX = ".json"
BYTES_MAX = 64 << 20
_ROLES: dict[str, Literal["system", "user"]] = {"system": "system", "user": "user"}


class _Call(msgspec.Struct, omit_defaults=True):
    tool_call_id: str
    function_name: str
    arguments: Any = None


class _Result(msgspec.Struct, omit_defaults=True):
    source_call_id: str | None = None
    content: Any = None


class _Observation(msgspec.Struct):
    results: list[_Result] = []


class _Step(msgspec.Struct, omit_defaults=True):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: Any = ""
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    is_copied_context: bool | None = None


class _Agent(msgspec.Struct, omit_defaults=True):
    name: str
    version: str = ""
    model_name: str | None = None


class AtifTrajectory(msgspec.Struct, omit_defaults=True):
    """One document."""

    schema_version: str
    agent: _Agent
    steps: list[_Step]
    session_id: str | None = None
    extra: dict[str, Any] = {}


def to_atif(trace: ChatTrace, session_id: str, version: str) -> AtifTrajectory:
    """Return a conversation as a trajectory."""
    steps: list[_Step] = []
    for message in trace.messages:
        if message.role == "tool" and steps:
            result = _Result(source_call_id=message.tool_call_id or None, content=message.content)
            steps[-1].observation = steps[-1].observation or _Observation(results=[])
            steps[-1].observation.results.append(result)
            continue
        calls = [
            _Call(one.id, one.function.name, _object(one.function.arguments))
            for one in message.tool_calls or []
        ]
        source = "agent" if message.role == "assistant" else message.role
        steps.append(
            _Step(
                step_id=len(steps) + 1,
                source="agent" if source == "agent" else "user" if source == "user" else "system",
                message=message.content or "",
                tool_calls=calls or None,
            )
        )
    agent = _Agent(name="penstock", version=version)
    return AtifTrajectory(
        schema_version=VERSION,
        agent=agent,
        steps=steps,
        session_id=session_id,
        extra=dict(trace.metadata),
    )


def read_atif(path: Path) -> ChatTrace:
    """Read a trajectory's file as a conversation.

    Raises:
        ConfigError: It is too large or malformed; the error names the field.

    """
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
        found = parse_json(data[:BYTES_MAX], AtifTrajectory, "trajectory")
    except (OSError, CodecError) as error:
        raise ConfigError(f"{path}: no ATIF trajectory: {error}") from error
    if not found.schema_version.startswith("ATIF-v1."):
        text = f"expected 'ATIF-v1.x', got {found.schema_version!r}"
        raise ConfigError(f"{path}: schema_version: {text}")
    messages = [one for step in found.steps if not step.is_copied_context for one in _said(step)]
    return ChatTrace(messages=messages, metadata={"session_id": found.session_id or path.stem})


def _said(step: _Step) -> Iterator[TraceMessage]:
    if step.source != "agent":
        yield TraceMessage(role=_ROLES[step.source], content=_text(step.message))
        return
    calls = [
        TraceCall(
            id=call.tool_call_id,
            function=TraceFunction(name=call.function_name, arguments=call.arguments),
        )
        for call in step.tool_calls or []
    ]
    yield TraceMessage(role="assistant", content=_text(step.message), tool_calls=calls or None)
    for result in step.observation.results if step.observation else []:
        if result.source_call_id and calls:
            yield TraceMessage(
                role="tool", content=_text(result.content), tool_call_id=result.source_call_id
            )
        else:
            yield TraceMessage(role="user", content=_text(result.content))


def _text(content: Any) -> str:
    """Return the text of a message, which may consist of parts."""
    if isinstance(content, list):
        parts = cast("list[object]", content)
        tables = [cast("dict[str, object]", one) for one in parts if isinstance(one, dict)]
        return "\n".join(str(one.get("text") or "") for one in tables)
    return content if isinstance(content, str) else ""


def _object(arguments: Any) -> Any:
    """Return a call's arguments as an object, as ATIF requires."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return parse_json(arguments, object, "arguments")
    except CodecError:
        return {"text": arguments}
