"""Sample users of the quickstart: real HTTP clients of the gateway, with real feedback.

Each has a function that one edit would fix, shows its file to the served model, applies the edit
that the model calls for, and accepts it if the file is then what the user expects.
"""

import asyncio
import contextlib
import random
from typing import Any

import aiohttp
import msgspec

from penstock import HARNESS_VERSION, HiddenTests, Task, UsersRequest, tool_schemas
from penstock.envs.harness.lookup import LINES_DEFAULT, numbered_lines
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

REQUEST_S_MAX = 60.0


async def users(request: UsersRequest) -> None:
    """Send the requests that `[users]` asks for, one after the other, each with its feedback.

    A request that fails is left out: the gateway's own metrics count it.
    """
    crowd = _Users(request)
    headers = {"Authorization": f"Bearer {request.key}"}
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        for _ in range(request.num_requests):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await crowd.ask(session, request.url, request.model)
            await asyncio.sleep(request.period_s)


class _Users:
    def __init__(self, request: UsersRequest) -> None:
        self._random = random.Random(request.seed)
        self._harness = request.harness
        solutions = request.hidden_tests
        self._cases = [
            (task, solutions[task.task_id], path)
            for task in request.tasks
            for path, text in solutions[task.task_id].gold_files.items()
            if task.files.get(path, text) != text
        ]

    async def ask(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        """Make one request and post what this user thinks of the answer."""
        task, tests, path = self._random.choice(self._cases)
        body = {
            "model": model,
            "messages": _messages(task, path, self._harness),
            "tools": tool_schemas(self._harness),
            "temperature": 1.0,
        }
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        accepted = _accepts(answer["choices"][0]["message"], task, tests, path)
        feedback = {
            "feedback_id": f"fb-{answer['id']}",
            "request_id": answer["id"],
            "name": "accept" if accepted else "reject",
            "value": 1.0,
        }
        async with session.post(f"{url}/v1/feedback", json=feedback) as reply:
            reply.raise_for_status()


def _messages(task: Task, path: str, harness: str) -> list[dict[str, Any]]:
    text = task.files[path]
    if harness != HARNESS_VERSION:
        text = numbered_lines(path, text, 1, LINES_DEFAULT)
    call = {
        "id": "call_0",
        "type": "function",
        "function": {
            "name": "read_file",
            "arguments": msgspec.json.encode({"path": path}).decode(),
        },
    }
    return [
        {"role": "user", "content": task.instruction},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": text},
    ]


def _accepts(message: dict[str, Any], task: Task, tests: HiddenTests, path: str) -> bool:
    """Return whether the proposed edits, applied, give the file that the user expects."""
    text = task.files[path]
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    for call in calls:
        try:
            arguments = parse_json(call["function"]["arguments"], dict[str, str], "arguments")
        except CodecError:
            return False
        old, new = arguments.get("old", ""), arguments.get("new", "")
        if call["function"]["name"] != "edit_file" or arguments.get("path") != path:
            continue
        if old and text.count(old) == 1:
            text = text.replace(old, new)
    return text == tests.gold_files[path]
