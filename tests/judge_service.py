"""A real HTTP service that speaks chat completions, as a judge's endpoint in tests."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from penstock.actors.judge.rubric.config import CriterionConfig, EndpointConfig, RubricConfig

Reply = str | int | web.Response
"""Text of the answer, or a status."""


class JudgeService:
    """Answers each request by `reply(body)`, and keeps what it was sent."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply]) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        found = self.reply(body)
        if isinstance(found, web.Response):
            return found
        if isinstance(found, int):
            return web.json_response({"error": {"message": "no"}}, status=found)
        return web.json_response(
            {
                "model": f"{body['model']}-2026",
                "choices": [{"message": {"role": "assistant", "content": found}}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 1},
            }
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["JudgeService"]:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/v1/chat/completions", self._post)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()
            await asyncio.sleep(0)


def make_rubric(url: str = "http://127.0.0.1:9/v1", **changes: Any) -> RubricConfig:
    endpoint = changes.pop("endpoint", {})
    fields: dict[str, Any] = {
        "name": "quality",
        "weight": 0.2,
        "criteria": [CriterionConfig(name="right", text="Is the change right?")],
        "retry_delay_s": 0.01,
        "endpoint": EndpointConfig(**{"url": url, "model": "m", **endpoint}),
    }
    return RubricConfig(**{**fields, **changes})
