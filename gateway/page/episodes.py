"""Endpoints for the episodes of a run: filtered rows, and single episodes in full."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from aiohttp import web

from penstock.gateway.errors import ApiError
from penstock.gateway.services import Services
from penstock.messages.base import Message
from penstock.messages.errors import PenstockError, RemoteCallError
from penstock.messages.requests.episodes import (
    EpisodeFilter,
    EpisodePart,
    ListEpisodes,
    ReadEpisode,
)
from penstock.messages.rpc import RemoteErrorKind

ANSWER_S = 30.0
"""Seconds to wait for each part of the monitor's reply."""
REPLY_BYTES_MAX = 64 << 20
"""Maximum size of a reply, which is assembled in memory."""


async def list_episodes(services: Services, request: web.Request) -> web.Response:
    """Return the rows that match the filter in the query, as a JSON list, newest first."""
    services.admit_viewer(request)
    try:
        row_filter = msgspec.convert(dict[str, Any](request.query), EpisodeFilter, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(400, "invalid_filter", str(error)) from error
    return await _reply(services, "monitor.episodes", ListEpisodes(wanted=row_filter))


async def read_episode(services: Services, request: web.Request) -> web.Response:
    """Return one episode in full, as JSON."""
    services.admit_viewer(request)
    rollout_id = request.match_info["rollout_id"]
    return await _reply(services, "monitor.episode", ReadEpisode(rollout_id=rollout_id))


async def _reply(services: Services, service: str, message: Message) -> web.Response:
    try:
        parts = services.ctx.stream_request(service, message, idle_s=ANSWER_S, is_served=True)
        data = await _joined(parts)
    except RemoteCallError as error:
        # The id may come from an old link: an unknown episode is no failure of the service.
        if error.kind == RemoteErrorKind.GONE:
            raise ApiError(404, "no_such_episode", error.text) from error
        raise ApiError(503, "no_episode", error.text) from error
    except PenstockError as error:
        raise ApiError(503, "no_monitor", str(error), retry_after_s=2.0) from error
    return web.Response(body=data, content_type="application/json")


async def _joined(parts: AsyncGenerator[Message, None]) -> bytes:
    data = bytearray()
    async for part in parts:
        assert isinstance(part, EpisodePart)
        data += part.data
        if len(data) > REPLY_BYTES_MAX:
            # Closed at once: the monitor would go on sending until the generator is collected.
            await parts.aclose()
            text = (
                f"the reply has more than {REPLY_BYTES_MAX >> 20} MiB: expected a narrower filter"
            )
            raise ApiError(503, "too_large", text)
    return bytes(data)
