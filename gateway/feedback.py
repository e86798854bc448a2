"""`/v1/feedback`: lets users send, amend, retract and look up signals on requests."""

import logging
from typing import Any

import msgspec
from aiohttp import web

from penstock.gateway.errors import ApiError, invalid, openai_error
from penstock.gateway.exchange.serve import admit
from penstock.gateway.identity import random_id
from penstock.gateway.keys import KeySpec
from penstock.gateway.record import sealed_content, with_correction_ids
from penstock.gateway.request_body import read_whole
from penstock.gateway.routes.body import decode_body
from penstock.gateway.services import Services
from penstock.messages.errors import ErasedError
from penstock.messages.feedback import FeedbackReceived, FeedbackRetracted, feedback_key
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.reading.sealed import FeedbackContent
from penstock.messages.signals.declaration import SignalSpec
from penstock.messages.streams import check_token

log = logging.getLogger(__name__)


class FeedbackBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/feedback`.

    `key` and `metric_name` are aliases of `name`, and `score` of `value`, as other tools name them.
    """

    name: str = ""
    key: str = ""
    metric_name: str = ""
    value: float | bool | None = None
    score: float | bool | None = None
    feedback_id: str = ""
    request_id: str = ""
    session_id: str = ""
    """Session whose last request is meant, instead of `request_id`."""
    user: str = ""
    """End user who gives the feedback, named as in requests; default: who made the request."""
    weight: float = 1.0
    comment: str = ""
    correction: str = ""
    source: str = ""
    occurred_at: str = ""
    metadata: dict[str, str] | None = None


class FeedbackBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/feedback/batch`."""

    items: list[msgspec.Raw]
    """Bodies of `POST /v1/feedback`, parsed one by one."""


class AmendmentBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `PATCH /v1/feedback/{feedback_id}`: only the fields that change."""

    value: float | bool | None = None
    weight: float | None = None
    comment: str | None = None
    correction: str | None = None


TEXT_CHARS_MAX = 16_384
"""Maximum length of a comment or a correction."""
ID_CHARS_MAX = 128
"""Maximum length of ids and other short fields."""
BATCH_ITEMS_MAX = 256
"""Maximum pieces of feedback in one batch."""


async def post_feedback(services: Services, request: web.Request) -> web.Response:
    """Store one piece of feedback; a repeated feedback_id changes nothing."""
    key = services.authenticate(request)
    data = await read_whole(services.config, request)
    return web.json_response(await _store(data, key, services))


async def post_feedback_batch(services: Services, request: web.Request) -> web.Response:
    """Store several pieces of feedback; each result has its own status, so some may be refused."""
    key = services.authenticate(request)
    batch = decode_body(await read_whole(services.config, request), FeedbackBatch)
    if not 1 <= len(batch.items) <= BATCH_ITEMS_MAX:
        raise invalid(f"expected 1 to {BATCH_ITEMS_MAX} items", "items")
    results: list[dict[str, Any]] = []
    for item in batch.items:
        # One invalid item must not cost the client the others.
        try:
            results.append(await _store(bytes(item), key, services))
        except ApiError as error:
            results.append({"status": error.status, "error": openai_error(error)})
    return web.json_response({"results": results})


async def get_feedback(services: Services, request: web.Request) -> web.Response:
    """Return what became of a piece of feedback."""
    async with admit(services, request) as admitted:
        event = await _find(services, request, admitted.key)
    fate = services.fates.fate(event.key())
    spec = services.signals.get(event.name)
    # Texts are not joined to samples as numbers are: they would seem to wait forever.
    if fate["status"] == "waiting" and spec is not None and spec.kind.is_text:
        fate["status"] = "recorded"
    fields = {name: getattr(event, name) for name in ("request_id", "name", "value")}
    fields["feedback_id"] = request.match_info["feedback_id"]
    return web.json_response(fields | fate)


async def _store(data: bytes, key: KeySpec, services: Services) -> dict[str, Any]:
    # Before any work: what is refused costs its sender as much as what is stored.
    await services.limits.charge_feedback(key, len(data))
    body = decode_body(data, FeedbackBody)
    body = msgspec.structs.replace(body, feedback_id=body.feedback_id or random_id("fb"))
    return await give(services, key, body, await check_feedback(services, key, body))


async def give(
    services: Services, key: KeySpec, body: FeedbackBody, event: FeedbackReceived
) -> dict[str, Any]:
    """Store feedback that `check_feedback` accepted.

    Args:
        services: What the endpoints share.
        key: Key of the request.
        body: Body of the feedback.
        event: Event that `check_feedback` made of the body.

    Returns:
        The fields of the response.

    Raises:
        ApiError: 429, the limit of the user is reached; 409, other feedback has the id.

    """
    content = FeedbackContent(
        comment=_short(body.comment, "comment"),
        correction=_short(body.correction, "correction"),
        source=_short(body.source, "source", ID_CHARS_MAX),
        occurred_at=_short(body.occurred_at, "occurred_at", ID_CHARS_MAX),
    )
    await services.limits.charge_user(key, event.user)
    since = await services.num_erasures(event.tenant, event.user)
    event = await _with_content(event, content, key, services, since)
    receipts = await services.ctx.publish(event)
    services.metrics.feedback.labels(event.name).inc()
    log.debug("feedback %s (%s) on request %s", event.feedback_id, event.name, event.request_id)
    if is_duplicate := receipts[0].is_duplicate:
        await _check_same(services, event)
    return _reply(body.feedback_id, event, is_duplicate=is_duplicate)


async def _check_same(services: Services, event: FeedbackReceived) -> None:
    """See that the feedback on the log is the one that was sent again, and not another user's.

    Raises:
        ApiError: 409.

    """
    known = await services.ctx.last(FeedbackReceived, event.key())
    if known is not None and (known.user, known.request_id) != (event.user, event.request_id):
        text = "other feedback of the tenant has this id: expected a new one"
        raise ApiError(409, "feedback_id_taken", text, "feedback_id")


async def patch_feedback(services: Services, request: web.Request) -> web.Response:
    """Amend feedback; the newest amendment counts."""
    key = services.authenticate(request)
    data = await read_whole(services.config, request)
    await services.limits.charge_feedback(key, len(data))
    body = decode_body(data, AmendmentBody)
    event = await _find_changeable(services, request, key)
    await services.limits.charge_user(key, event.user)
    if body == AmendmentBody():
        raise invalid(f"expected one of {', '.join(body.__struct_fields__)}", "value")
    amended = msgspec.structs.replace(
        event,
        value=event.value if body.value is None else float(body.value),
        weight=event.weight if body.weight is None else body.weight,
        # An event of its own: the log keeps one event per key, and the original stays on it.
        feedback_id=f"{event.feedback_id}.{random_id('amend')}",
        amends=event.feedback_id,
    )
    _check_numbers(amended, _declared(event.name, key, services))
    # Before the old texts are read: an erasure meanwhile must keep them from a new key.
    since = await services.num_erasures(event.tenant, event.user)
    content = await _content(event, services)
    changed = {
        name: _short(text, name)
        for name in ("comment", "correction")
        if (text := getattr(body, name)) is not None
    }
    content = msgspec.structs.replace(content, **changed)
    await services.ctx.publish(await _with_content(amended, content, key, services, since))
    feedback_id = request.match_info["feedback_id"]
    return web.json_response(_reply(feedback_id, event, is_duplicate=False))


async def delete_feedback(services: Services, request: web.Request) -> web.Response:
    """Retract feedback with all its amendments; retracting again changes nothing.

    `versions` in the response lists the versions that it already trained; they stay as they are.
    """
    key = services.authenticate(request)
    await services.limits.charge_retraction(key)
    event = await _find_changeable(services, request, key)
    await services.ctx.publish(
        FeedbackRetracted(
            feedback_id=event.feedback_id,
            request_id=event.request_id,
            tenant=event.tenant,
            user=event.user,
        )
    )
    versions = services.fates.fate(event.key())["versions"]
    fields = {"feedback_id": request.match_info["feedback_id"], "versions": versions}
    return web.json_response(fields | {"retracted": True})


async def _find(services: Services, request: web.Request, key: KeySpec) -> FeedbackReceived:
    feedback_id = _token(request.match_info["feedback_id"], "feedback_id")
    name = services.pseudonyms.feedback(key, feedback_id)
    event = await services.ctx.last(FeedbackReceived, feedback_key(key.tenant, name))
    if event is None:  # Logs of earlier releases have ids as they were sent.
        event = await services.ctx.last(FeedbackReceived, feedback_key(key.tenant, feedback_id))
    if event is None:
        text = f"the tenant of this key has no feedback {feedback_id!r}"
        raise ApiError(404, "not_found", text, "feedback_id")
    return event


async def _find_changeable(
    services: Services, request: web.Request, key: KeySpec
) -> FeedbackReceived:
    """Return feedback that this key may change.

    Raises:
        ApiError: 403, a trusted key sent it and this key is not trusted; 404, it is unknown.

    """
    event = await _find(services, request, key)
    if event.is_trusted and not key.is_trusted:
        text = "a trusted key sent this feedback: only a trusted key may change it"
        raise ApiError(403, "not_trusted", text, "feedback_id")
    return event


async def check_feedback(services: Services, key: KeySpec, body: FeedbackBody) -> FeedbackReceived:
    """Return the event for a body, without the texts that the user wrote.

    Raises:
        ApiError: 400 that names the field; 403, the key may not send this feedback.

    """
    spec = _declared(_token(body.name or body.key or body.metric_name, "name"), key, services)
    value = body.value if body.value is not None else body.score
    if spec.kind.is_text:
        if not getattr(body, spec.kind):
            raise invalid(f"the signal {spec.name!r} needs a text", str(spec.kind))
        value = 0.0
    if value is None:
        raise invalid("expected a number or a boolean", "value")
    request_id = _request_id(body, key, services)
    event = FeedbackReceived(
        feedback_id=services.pseudonyms.feedback(key, _token(body.feedback_id, "feedback_id")),
        request_id=request_id,
        name=spec.name,
        value=float(value),
        key_id=key.key_id,
        is_trusted=key.is_trusted,
        tenant=key.tenant,
        user=await _user(body.user, request_id, key, services),
        weight=body.weight,
    )
    _check_numbers(event, spec)
    return event


def _declared(name: str, key: KeySpec, services: Services) -> SignalSpec:
    """Return a declared signal.

    Raises:
        ApiError: 400, it is not declared; 403, this key may not send it.

    """
    spec = services.signals.get(name)
    if spec is None:
        text = f"expected one of {', '.join(services.signals)}, got {name!r}"
        raise ApiError(400, "undeclared_signal", text, "name")
    if spec.trusted_only and not key.is_trusted:
        raise ApiError(403, "not_trusted", f"only trusted keys may send {name!r}", "name")
    return spec


async def _content(event: FeedbackReceived, services: Services) -> FeedbackContent:
    """Return the texts of a piece of feedback; none if its user was erased."""
    if event.content is None:
        return FeedbackContent()
    try:
        data = await services.vault.open(event.content, event.key())
    except ErasedError:
        return FeedbackContent()
    return parse_msgpack(data, FeedbackContent, f"content of feedback {event.feedback_id}")


async def _with_content(
    event: FeedbackReceived, content: FeedbackContent, key: KeySpec, services: Services, since: int
) -> FeedbackReceived:
    """Return feedback with its texts encrypted, or without them if they may not be stored."""
    owner = await services.owner_of(event.request_id)
    is_counted = owner is not None and not owner.is_stored
    if is_counted:
        # The request is stored as counts, without its user: feedback must not reveal them either.
        event = msgspec.structs.replace(event, user=services.pseudonyms.user(key, ""))
    if is_counted or not key.storage_consent:
        return msgspec.structs.replace(event, content=None, source="", occurred_at="")
    content = with_correction_ids(content, services.chat_format)
    try:
        sealed = await sealed_content(services.vault, event, content, since)
    except ErasedError:
        sealed = None
    return msgspec.structs.replace(event, content=sealed, source="", occurred_at="")


def _request_id(body: FeedbackBody, key: KeySpec, services: Services) -> str:
    if body.request_id:
        return _token(body.request_id, "request_id")
    if not body.session_id:
        raise invalid("expected request_id or session_id", "request_id")
    session_id = services.pseudonyms.session(key, body.session_id)
    user = services.index.user_of(key.tenant, session_id) or ""
    if body.user:
        user = services.pseudonyms.user(key, body.user)
    elif user == "" and services.index.user_of(key.tenant, session_id) is not None:
        text = "several users of the tenant have a session of this name: expected the one meant"
        raise ApiError(409, "ambiguous_session", text, "user")
    request_id = services.index.last_of(key.tenant, user, session_id)
    if request_id is None:
        text = f"the tenant of this key made no request in session {body.session_id!r}"
        raise ApiError(404, "not_found", text, "session_id")
    return request_id


async def _user(name: str, request_id: str, key: KeySpec, services: Services) -> str:
    """Return who gives feedback: the named user, else the user of the request, else the key.

    A request that is not on the log yet has no known owner; the feedback join checks its tenant.

    Raises:
        ApiError: 403, the request belongs to another tenant.

    """
    owner = await services.owner_of(request_id)
    if owner is not None and owner.tenant != key.tenant:
        if not key.is_trusted:
            text = "the request was made with a key of another tenant"
            raise ApiError(403, "not_your_request", text, "request_id")
        owner = None
    return owner.user if owner is not None and not name else services.pseudonyms.user(key, name)


def _check_numbers(event: FeedbackReceived, spec: SignalSpec) -> None:
    if expected := spec.expected(event.value):
        raise invalid(expected, "value")
    if not 0 <= event.weight <= 1:
        raise invalid("expected a number from 0 to 1", "weight")


def _token(value: str, param: str) -> str:
    try:
        check_token(value, param)
    except ValueError as error:
        raise invalid(str(error), param) from error
    if len(value) > ID_CHARS_MAX:
        raise invalid(f"expected at most {ID_CHARS_MAX} characters", param)
    return value


def _short(value: str, param: str, num_chars_max: int = TEXT_CHARS_MAX) -> str:
    if len(value) > num_chars_max:
        raise invalid(f"expected at most {num_chars_max} characters", param)
    return value


def _reply(feedback_id: str, event: FeedbackReceived, *, is_duplicate: bool) -> dict[str, Any]:
    return {
        "feedback_id": feedback_id,
        "request_id": event.request_id,
        "duplicate": is_duplicate,
    }
