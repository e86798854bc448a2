"""`POST /v1/sessions`: imports finished sessions of another harness or model, with their outcome.

```
 messages, tools, outcome ─▶ is the session known? ─ yes ─▶ store the outcome for it
                                   └ no ─▶ store one record, tokenized by the chat format, ─▶ same
```
The behavior logprobs of an imported session are unknown, so policy gradients cannot train on it
(`not_reproducible`). Its outcome is a label, which KTO can use.
"""

import logging

import msgspec
import numpy as np
from aiohttp import web

from penstock.gateway.arms import Route
from penstock.gateway.conversation import LiveRequest
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.exchange.serve import AdmittedRequest, admit, hold_places
from penstock.gateway.exchange.session_tokens import SessionTokens, check_session
from penstock.gateway.feedback import FeedbackBody, check_feedback, give
from penstock.gateway.record import AnsweredRequest, Requester, consent_of
from penstock.gateway.request_body import read_whole
from penstock.gateway.routes.body import check_depth, decode_body
from penstock.gateway.routes.chat import ChatBodyMessage, ChatTool, read_messages, read_tools
from penstock.gateway.services import Owner, Services
from penstock.kernels.arrays import to_array
from penstock.messages.feedback import FeedbackReceived
from penstock.messages.gates import ReplyFacts
from penstock.messages.rollout import EXTERNAL_VERSION, StopReason, Turn, VersionSpan

log = logging.getLogger(__name__)

NUM_SIGNALS_MAX = 32
"""Maximum pieces of feedback in one imported session."""


class SessionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`; messages and tools as in chat completions."""

    session_id: str
    """Name of the session, unique in its tenant; a repeated import changes nothing."""
    messages: list[ChatBodyMessage]
    """All messages of the session; the last one is an assistant message."""
    tools: list[ChatTool] = []
    outcome: list[FeedbackBody] = []
    """Feedback on the session, without request_id and session_id."""
    user: str = ""
    store: bool = True
    metadata: dict[str, str] = {}


async def post_session(services: Services, request: web.Request) -> web.Response:
    """Import a finished session and its outcome."""
    async with admit(services, request) as admitted:
        body = decode_body(await read_whole(services.config, request), SessionBody)
        client = await _client(services, admitted, body)
        if not body.session_id:
            raise invalid("expected a name that no other session of the tenant has", "session_id")
        session_id = services.pseudonyms.session(admitted.key, body.session_id)
        known = services.index.last_of(admitted.key.tenant, client.user, session_id)
        # Derived from user and session: a retry at another gateway writes the same record.
        request_id = known or services.pseudonyms.import_id(admitted.key, client.user, session_id)
        for item in body.outcome[:NUM_SIGNALS_MAX]:
            await services.limits.charge_feedback(client.key, len(msgspec.json.encode(item)))
        # Checked before the session is stored: a wrong outcome must not leave half an import.
        outcome = await _outcome(services, client, body, request_id)
        with hold_places(services, 1):
            num_tokens = 0
            if known is None:
                conversation = _conversation(body)
                services.planner.check_size(conversation, admitted.charge)
                tokens = await services.planner.session(
                    conversation, key_id=client.key.key_id, charge=admitted.charge
                )
                await _record(services, client, tokens, request_id, session_id)
                num_tokens = tokens.num_tokens
            stored = [await give(services, client.key, item, event) for item, event in outcome]
    log.info(
        "imported session %s: %d tokens, %d pieces of feedback, %s",
        request_id,
        num_tokens,
        len(stored),
        "new" if known is None else "known already",
    )
    fields = {"request_id": request_id, "duplicate": known is not None, "num_tokens": num_tokens}
    return web.json_response(fields | {"session_id": body.session_id, "outcome": stored})


async def _client(services: Services, admitted: AdmittedRequest, body: SessionBody) -> Requester:
    consent = consent_of(admitted.key, body.store, body.metadata)
    if not consent.storage:
        text = "importing a session stores it: expected a key and a request with storage consent"
        raise ApiError(403, "no_consent", text, "store")
    user = services.pseudonyms.user(admitted.key, body.user)
    erasures = await services.num_erasures(admitted.key.tenant, user)
    return Requester(key=admitted.key, user=user, consent=consent, erasures=erasures)


def _conversation(body: SessionBody) -> LiveRequest:
    for tool in body.tools:
        check_depth(tool.function.parameters, "tools")
    messages = read_messages(body.messages)
    check_session(messages)
    return LiveRequest(model="", messages=messages, tools=read_tools(body.tools), user=body.user)


async def _outcome(
    services: Services, client: Requester, body: SessionBody, request_id: str
) -> list[tuple[FeedbackBody, FeedbackReceived]]:
    """Return the feedback on a session as checked events, each with its body."""
    if len(body.outcome) > NUM_SIGNALS_MAX:
        raise invalid(f"expected at most {NUM_SIGNALS_MAX} signals", "outcome")
    found: list[tuple[FeedbackBody, FeedbackReceived]] = []
    for index, item in enumerate(body.outcome):
        if item.request_id or item.session_id:
            text = "expected neither request_id nor session_id: the feedback is on this session"
            raise invalid(text, f"outcome[{index}]")
        name = item.name or item.key or item.metric_name
        filled = msgspec.structs.replace(
            item,
            request_id=request_id,
            # Derived from session and signal: a retry gets the same id and is a duplicate.
            feedback_id=item.feedback_id or f"{request_id}-{name}",
            user=item.user or body.user,
        )
        if any(filled.feedback_id == other.feedback_id for other, _ in found):
            text = f"the signal {name!r} is given twice: expected a distinct feedback_id"
            raise invalid(text, f"outcome[{index}].feedback_id")
        found.append((filled, await check_feedback(services, client.key, filled)))
    return found


async def _record(
    services: Services,
    client: Requester,
    tokens: SessionTokens,
    request_id: str,
    session_id: str,
) -> None:
    owner = Owner(tenant=client.key.tenant, user=client.user)
    num_reply = len(tokens.reply_ids)
    await services.recorder.record(
        AnsweredRequest(
            request_id=request_id,
            session_id=session_id,
            chain=request_id,
            client=client,
            route=Route(channel=""),
            channel="",
            facts=ReplyFacts(),
            at=services.ctx.now(),
            turn=Turn(
                context_ids=to_array(np.asarray(tokens.context_ids, np.int32)),
                token_ids=to_array(np.asarray(tokens.reply_ids, np.int32)),
                # Unknown, and never used: the record is marked external.
                behavior_logprobs=to_array(np.zeros(num_reply, np.float32)),
                version_spans=[VersionSpan(policy_version=EXTERNAL_VERSION, num_tokens=num_reply)],
                stop_reason=StopReason.STOP,
                forced=tokens.between,
            ),
            policy_version=EXTERNAL_VERSION,
            replica="",
            is_external=True,
        )
    )
    services.index.put(request_id, owner, session_id)
