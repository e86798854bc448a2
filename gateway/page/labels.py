"""`POST /v1/monitor/episodes/{rollout_id}/labels`: stores a person's label of an episode.

Only operators may label, even on this host. A page of another site cannot do it through an
operator's browser: it would need a CORS preflight to send JSON, which the gateway does not answer,
and browsers mark such requests as cross-site.
"""

import logging

import msgspec
from aiohttp import web

from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.identity import random_id
from penstock.gateway.request_body import read_whole
from penstock.gateway.routes.body import decode_body
from penstock.gateway.services import Services
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import RolloutFinished
from penstock.messages.signals.episode_labels import (
    Comment,
    EpisodeLabeled,
    Labeler,
    LabelValue,
)
from penstock.messages.streams import check_token

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 16 << 10
"""Maximum size of a body in bytes."""
# `Sec-Fetch-Site` of the gateway's own page; None is a client that is no browser.
_OWN_SITES = {None, "same-origin", "none"}


class LabelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a label."""

    value: LabelValue | None
    """Score from 0 (bad) to 1 (good); null retracts the label of this labeler."""
    labeler: Labeler = "operator"
    comment: Comment = ""


async def post_label(services: Services, request: web.Request) -> web.Response:
    """Store a label of a finished episode.

    Raises:
        ApiError: 401 or 403, the key is not an operator's; 403, a page of another site sent it;
            404, the episode is unknown or still running; 400, 413 or 415, the body is invalid;
            429, a feedback limit of the key is reached.

    """
    key = services.admit_operator(request)
    if request.headers.get("Sec-Fetch-Site") not in _OWN_SITES:
        raise ApiError(403, "cross_site", "expected a request from the gateway's own page")
    if request.content_type != "application/json":
        raise ApiError(415, "unsupported_media_type", "expected Content-Type application/json")
    data = await read_whole(services.config, request)
    body = read_label(data)
    # Charged like feedback, so that a script with an operator key cannot flood the log.
    await services.limits.charge_feedback(key, len(data))
    finished = await _finished(services, request)
    event = EpisodeLabeled(
        rollout_id=finished.rollout_id,
        group_id=finished.group_id,
        label_id=random_id("label"),
        labeler=body.labeler,
        value=body.value,
        comment=body.comment,
    )
    await services.ctx.publish(event)
    log.info("episode %s is labeled: %s", event.rollout_id, event.label_id)
    return web.json_response({"label_id": event.label_id})


def read_label(data: bytes) -> LabelBody:
    """Parse the body of a label.

    Raises:
        ApiError: 413, it is too large; 400 that names the field.

    """
    if len(data) > BODY_BYTES_MAX:
        raise ApiError(413, "body_too_large", f"expected at most {BODY_BYTES_MAX} bytes")
    body = decode_body(data, LabelBody)
    if not body.labeler.isprintable():
        raise invalid("expected printable text", "labeler")
    return body


async def _finished(services: Services, request: web.Request) -> RolloutFinished:
    rollout_id = request.match_info["rollout_id"]
    try:
        finished = await services.ctx.last(RolloutFinished, check_token(rollout_id, "episode"))
    except ConfigError:
        finished = None
    if finished is None:
        raise ApiError(404, "no_such_episode", "the log has no finished episode with this id")
    return finished
