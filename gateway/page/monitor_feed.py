"""Feeds the state of the run to live pages: one request to the monitor serves all viewers."""

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from aiohttp import web

from penstock.actors.runtime.context import Context
from penstock.gateway.errors import ApiError
from penstock.gateway.services import Services
from penstock.messages.errors import PenstockError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.telemetry import MonitorSnapshot, ReadMonitor

log = logging.getLogger(__name__)

SERVICE = "monitor.state"
FRESH_S = 0.5
"""Seconds for which a snapshot is reused."""
ANSWER_S = 3.0
"""Seconds to wait for the monitor."""
PERIOD_S = 1.0
"""Seconds between updates of a page."""
STREAM_S_MAX = 3600.0
"""Maximum seconds of one stream; browsers reconnect by themselves."""


class MonitorFeed:
    """Caches the last snapshot, so that the number of viewers costs the monitor nothing."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._lock = asyncio.Lock()
        self._snapshot: MonitorSnapshot | None = None
        self._at = 0.0
        self.num_viewers = 0

    async def snapshot(self) -> MonitorSnapshot:
        """Return the state of the run, at most `FRESH_S` old.

        Raises:
            PenstockError: The monitor does not answer.

        """
        # Viewers that come while one request is under way wait for its reply.
        async with self._lock:
            if self._snapshot is None or self._ctx.monotonic() - self._at > FRESH_S:
                reply = await self._ctx.request(SERVICE, ReadMonitor(), deadline_s=ANSWER_S)
                assert isinstance(reply, MonitorSnapshot)
                self._snapshot, self._at = reply, self._ctx.monotonic()
            return self._snapshot


async def monitor_state(
    services: Services, feed: MonitorFeed, request: web.Request
) -> web.Response:
    """Return the complete state as JSON."""
    services.admit_viewer(request)
    try:
        snapshot = await feed.snapshot()
    except PenstockError as error:
        raise ApiError(503, "no_monitor", str(error), retry_after_s=2.0) from error
    return web.Response(body=snapshot.state_json, content_type="application/json")


async def monitor_events(
    services: Services, feed: MonitorFeed, request: web.Request
) -> web.StreamResponse:
    """Stream the sections of the state that changed, once a second."""
    services.admit_viewer(request)
    if feed.num_viewers >= services.config.num_viewers_max:
        log.warning("live page refused: %d are open already", feed.num_viewers)
        raise ApiError(503, "too_many_viewers", "too many live pages are open", retry_after_s=10.0)
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    # After `prepare`: a client that is gone before its headers are out never counts.
    feed.num_viewers += 1
    try:
        await _send_changes(services, feed, response)
    finally:
        feed.num_viewers -= 1
    return response


async def _send_changes(
    services: Services, feed: MonitorFeed, response: web.StreamResponse
) -> None:
    sent: Mapping[str, bytes] = {}
    end = services.ctx.monotonic() + STREAM_S_MAX
    while services.ctx.monotonic() < end and not services.is_draining:
        try:
            sections = split_sections((await feed.snapshot()).state_json)
            event = b"data: " + changed_sections(sent, sections) + b"\n\n"
            sent = sections
        except PenstockError:
            # A comment: it keeps the connection open until the monitor is back.
            event = b": the monitor does not answer\n\n"
        # A browser that stops reading must not hold its place among the viewers.
        async with asyncio.timeout(services.config.write_s_max):
            await response.write(event)
        await services.ctx.sleep(PERIOD_S)


def split_sections(state_json: bytes) -> Mapping[str, bytes]:
    """Return the JSON text of each top-level field."""
    raw = parse_json(state_json, dict[str, msgspec.Raw], "state")
    return {name: bytes(value) for name, value in raw.items()}


def changed_sections(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> bytes:
    """Return a JSON object with the fields whose bytes differ."""
    changed = {name: msgspec.Raw(value) for name, value in new.items() if old.get(name) != value}
    return msgspec.json.encode(changed)
