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

from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.harness.lookup import LINES_DEFAULT, numbered_lines
from penstock.envs.harness.tools import tool_schemas
from penstock.envs.tasks.storage import load_hidden_tests, load_tasks
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.runs import RunDir
from penstock.messages.bus import Bus
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.task import HiddenTests, Split, Task
from penstock.messages.weights import WeightsApplied

REQUEST_S_MAX = 60.0


async def run_sample_users(run: RunDir, config: RunConfig, bus: Bus) -> None:
    """Send `users.num_requests` requests, one every `users.period_s`, once the model is served.

    A request that fails is left out: the gateway's own metrics count it.
    """
    if config.users.num_requests == 0:
        return
    await _until_served(bus, config)
    tasks = await load_tasks(run.store(), Split.TRAIN)
    solutions = await load_hidden_tests(run.store(), Split.TRAIN)
    users = _Users(tasks, solutions, config.run.seed, config.pacer.harness)
    headers = {"Authorization": f"Bearer {run.gateway_key.read_text().strip()}"}
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        for _ in range(config.users.num_requests):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await users.ask(session, run.gateway_url.read_text().strip(), config.gateway.model)
            await asyncio.sleep(config.users.period_s)


async def _until_served(bus: Bus, config: RunConfig) -> None:
    async with asyncio.timeout(config.run.wall_s_max):
        async for _ in bus.follow([WeightsApplied]):
            return


class _Users:
    def __init__(
        self, tasks: list[Task], solutions: dict[str, HiddenTests], seed: int, harness: str
    ) -> None:
        self._random = random.Random(seed)
        self._harness = harness
        self._cases = [
            (task, solutions[task.task_id], path)
            for task in tasks
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
