"""Opens a page in headless Chromium over its DevTools protocol."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Page:
    """One tab; what went wrong in it is kept in `problems`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._num_calls = 0
        self.problems: list[dict[str, Any]] = []

    async def open(self, url: str, *, width: int, height: int) -> None:
        for domain in ("Runtime", "Log", "Page"):
            await self._call(f"{domain}.enable")
        await self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self._call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        answer = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        async with asyncio.timeout(20):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.05)

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        number = self._num_calls
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=20)
            if message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.problems.append(message["params"])
            if message.get("id") == number:
                return message["result"]


@contextlib.asynccontextmanager
async def chromium(program: str, profile: Path) -> AsyncIterator[Page]:
    process = await asyncio.create_subprocess_exec(
        program,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            port = await _port(process)
        async with aiohttp.ClientSession() as http:
            tabs = await (await http.get(f"http://127.0.0.1:{port}/json")).json()
            (tab,) = [tab for tab in tabs if tab["type"] == "page"]
            url = tab["webSocketDebuggerUrl"]
            async with http.ws_connect(url, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        if b"DevTools listening on ws://127.0.0.1:" in line:
            return line.decode().split("127.0.0.1:")[1].split("/")[0]
    raise RuntimeError("chromium ended before it listened")
