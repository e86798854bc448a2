"""`penstock agent --repo DIR`: the harness of training on a checkout, with any served model.

```
 instruction ─▶ chat completions (tools) ─▶ calls ─▶ Session over the checkout ─▶ results ─┐
                       ▲─────────────────────────────────────────────────────────────────────┘
```
"""

import argparse
import asyncio
import os
import sys
from typing import Any

import aiohttp
import msgspec

from penstock.envs.harness import HARNESS_VERSION_2
from penstock.envs.harness.retrieval.embeddings import HttpEmbedder
from penstock.envs.harness.session import Session
from penstock.envs.harness.tool_calls import ToolResult
from penstock.envs.harness.versions import tool_schemas
from penstock.infra.commands.checkout import open_checkout
from penstock.infra.commands.output import print_result, printable
from penstock.infra.run.runs import find_run
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

REQUEST_S_MAX = 300.0
SAID_CHARACTERS_MAX = 400
KEY_VARIABLE = "PENSTOCK_AGENT_KEY"


class AgentError(PenstockError, ConnectionError):
    """The model's endpoint refused or did not answer; the text has its words."""


class AgentReport(msgspec.Struct, kw_only=True):
    """How an agent's work went."""

    end: str = ""
    """finished, answered or turn_limit."""
    num_turns: int = 0
    num_calls: int = 0
    num_invalid_calls: int = 0
    answer: str = ""
    harness: str = HARNESS_VERSION_2


class _RequestedFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _RequestedToolCall(msgspec.Struct):
    function: _RequestedFunction
    id: str = ""
    type: str = "function"


class _ChatReply(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_RequestedToolCall] | None = None


class _Choice(msgspec.Struct):
    message: _ChatReply


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Model:
    """A chat-completions endpoint.

    Args:
        url: Up to and with `/v1`.
        key: Bearer token.
        name: The model's name there.

    """

    def __init__(self, url: str, key: str, name: str) -> None:
        self._url, self._name = url.rstrip("/"), name
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def reply(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the assistant's next message.

        Raises:
            AgentError: No answer, or a refusal.

        """
        body = {"model": self._name, "messages": messages, "tools": tool_schemas(HARNESS_VERSION_2)}
        timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.post(f"{self._url}/chat/completions", json=body) as reply,
            ):
                text = await reply.text()
                if reply.status != 200:
                    raise AgentError(f"{self._url}: status {reply.status}: {text[:300]}")
            message = parse_json(text, _Completion, "reply").choices[0].message
        except (aiohttp.ClientError, TimeoutError, CodecError, LookupError) as error:
            raise AgentError(f"{self._url}: {type(error).__name__}: {error}") from error
        return msgspec.to_builtins(message)


async def work(
    model: Model, session: Session, instruction: str, num_turns_max: int, say: Any
) -> AgentReport:
    """Let the model work until it finishes, answers without a call, or has used its turns."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    report = AgentReport(end="turn_limit")
    for _ in range(num_turns_max):
        message = await model.reply(messages)
        report.num_turns += 1
        requested: list[dict[str, Any]] = message.get("tool_calls") or []
        messages.append(
            {"role": "assistant", "content": message.get("content"), "tool_calls": requested}
            if requested
            else {"role": "assistant", "content": message.get("content") or ""}
        )
        if not requested:
            report.end, report.answer = "answered", message.get("content") or ""
            return report
        results = await _carry_out(session, requested, report, say)
        for one, result in zip(requested, results, strict=True):
            messages.append(
                {"role": "tool", "tool_call_id": one.get("id", ""), "content": result.text}
            )
        if any(result.is_finish for result in results):
            report.end = "finished"
            return report
    return report


async def _carry_out(
    session: Session, requested: list[dict[str, Any]], report: AgentReport, say: Any
) -> list[ToolResult]:
    calls = [to_call(one) for one in requested]
    results = await session.run(calls)
    report.num_calls += len(calls)
    report.num_invalid_calls += sum(not result.is_valid for result in results)
    for call, result in zip(calls, results, strict=True):
        given = " ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        say(f"> {call.name} {given}"[:SAID_CHARACTERS_MAX])
        say(result.text[:SAID_CHARACTERS_MAX])
    return results


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


def run(arguments: argparse.Namespace) -> int:
    """Run the command; exit code 1 where the turns ran out."""
    report = asyncio.run(_run(arguments))
    print_result(report, as_json=arguments.json)
    return 1 if report.end == "turn_limit" else 0


async def _run(arguments: argparse.Namespace) -> AgentReport:
    model = _model(arguments)
    limits = Limits(tool_s_max=arguments.tool_s, output_bytes_max=arguments.output_bytes)
    embedder = None
    if arguments.embeddings:
        embedder = HttpEmbedder(arguments.embeddings, arguments.embeddings_model)
    async with open_checkout(arguments.repo, _say) as sandbox:
        session = Session(HARNESS_VERSION_2, sandbox, limits, embedder)
        return await work(model, session, arguments.instruction, arguments.turns, _say)


def _model(arguments: argparse.Namespace) -> Model:
    if arguments.url:
        key = arguments.key_file.read_text().strip() if arguments.key_file else ""
        return Model(arguments.url, key or os.environ.get(KEY_VARIABLE, ""), arguments.model)
    found = find_run(arguments.run, arguments.runs_dir)
    key = found.gateway_key.read_text().strip()
    return Model(f"{found.gateway_url.read_text().strip()}/v1", key, arguments.model)


def _say(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")
