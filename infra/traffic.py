"""Sample users for the quickstart: real HTTP clients of the gateway, with real feedback.

Each asks the served model to fix a small function, checks the answer by itself (does the edit it
proposes apply, and do the user's own tests pass?) and posts what a user would post.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from penstock.messages.task import Task

REQUEST_S = 60.0


class TrafficReport(msgspec.Struct, kw_only=True):
    """What the sample users saw."""

    num_requests: int = 0
    num_failed: int = 0
    num_feedback: int = 0
    num_accepted: int = 0


Check = Callable[[Task, dict[str, object]], Awaitable[float]]
"""Scores an assistant message for a task: 1 accepts, 0 rejects."""


class SampleUsers:
    """A bounded, paced stream of requests to one gateway."""

    def __init__(self, base_url: str, key: str, tasks: list[Task], *, seed: int) -> None:
        self._base_url = base_url
        self._key = key
        self._tasks = tasks
        self._random = random.Random(seed)
        self.report = TrafficReport()

    async def run(self, messages_of: Callable[[Task], list[dict[str, object]]], check: Check, *,
                  num_requests: int, period_s: float) -> None:  # fmt: skip
        """Send `num_requests`, one every `period_s`; a failed one is counted, never hidden."""
        headers = {"Authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            for _ in range(num_requests):
                task = self._random.choice(self._tasks)
                try:
                    await self._one(session, task, messages_of(task), check)
                except (aiohttp.ClientError, TimeoutError):
                    self.report.num_failed += 1
                await asyncio.sleep(period_s)

    async def _one(self, session: aiohttp.ClientSession, task: Task,
                   messages: list[dict[str, object]], check: Check) -> None:  # fmt: skip
        self.report.num_requests += 1
        body = {"model": "policy", "messages": messages, "temperature": 1.0}
        async with session.post(f"{self._base_url}/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        score = await check(task, answer["choices"][0]["message"])
        self.report.num_accepted += int(score > 0.5)
        feedback = {
            "feedback_id": f"fb-{answer['id']}",
            "request_id": answer["id"],
            "name": "accept" if score > 0.5 else "reject",
            "value": 1.0,
        }
        async with session.post(f"{self._base_url}/v1/feedback", json=feedback) as reply:
            reply.raise_for_status()
            self.report.num_feedback += 1
