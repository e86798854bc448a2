"""`POST /v1/sessions`: finished sessions that another harness or model sampled, and their outcome.

```
 messages, tools, outcome ─▶ has the service this session? ─ yes ─▶ the outcome counts on that
                                   └ no ─▶ one record, tokens by the chat format ─▶ the outcome
```
Nobody knows how probable the tokens of such a session were where it was sampled, so no policy
gradient can train it (`not_reproducible`); its outcome is a label, which KTO can.
"""

import msgspec
import numpy as np
from aiohttp import web

from penstock.gateway.arms import Route
from penstock.gateway.conversation import LiveRequest
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.exchange.serve import Admitted, admit, hold_places
from penstock.gateway.exchange.session_tokens import SessionTokens, check_session
from penstock.gateway.feedback import FeedbackBody, check_feedback, give
from penstock.gateway.record import Answered, Requester, consent_of
from penstock.gateway.request_body import read_whole
from penstock.gateway.routes.body import check_depth, decode_body
from penstock.gateway.routes.chat import ChatBodyMessage, ChatTool, read_messages, read_tools
from penstock.gateway.services import Owner, Services
from penstock.kernels.arrays import to_array
from penstock.messages.feedback import FeedbackReceived
from penstock.messages.gates import ReplyFacts
from penstock.messages.rollout import EXTERNAL_VERSION, StopReason, Turn, VersionSpan

NUM_SIGNALS_MAX = 32


class SessionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`; messages and tools as in chat completions."""

    session_id: str
    """Names it in its tenant; the same again changes nothing."""
    messages: list[ChatBodyMessage]
    """All of them, the last the assistant's."""
    tools: list[ChatTool] = []
    outcome: list[FeedbackBody] = []
    """What came of it: feedback without request and session."""
    user: str = ""
    store: bool = True
    metadata: dict[str, str] = {}


async def post_session(services: Services, request: web.Request) -> web.Response:
    """Take a finished session."""
    async with admit(services, request) as admitted:
        body = decode_body(await read_whole(services, request), SessionBody)
        client = _client(services, admitted, body)
        if not body.session_id:
            raise invalid("expected a name that is the session's alone", "session_id")
        session_id = services.pseudonyms.session(admitted.key, body.session_id)
        known = services.index.last_of(admitted.key.tenant, session_id)
        request_id = known or f"ses-{session_id}"
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
            given = [
                await give(services, client.key, each, event, len(msgspec.json.encode(each)))
                for each, event in outcome
            ]
    fields = {"request_id": request_id, "duplicate": known is not None, "num_tokens": num_tokens}
    return web.json_response(fields | {"session_id": body.session_id, "outcome": given})


def _client(services: Services, admitted: Admitted, body: SessionBody) -> Requester:
    consent = consent_of(admitted.key, body.store, body.metadata)
    if not consent.storage:
        text = "a session is taken to be stored: expected a key, and a request, that allow it"
        raise ApiError(403, "no_consent", text, "store")
    user = services.pseudonyms.user(admitted.key, body.user)
    return Requester(key=admitted.key, user=user, consent=consent)


def _conversation(body: SessionBody) -> LiveRequest:
    for tool in body.tools:
        check_depth(tool.function.parameters, "tools")
    messages = read_messages(body.messages)
    check_session(messages)
    return LiveRequest(model="", messages=messages, tools=read_tools(body.tools), user=body.user)


async def _outcome(
    services: Services, client: Requester, body: SessionBody, request_id: str
) -> list[tuple[FeedbackBody, FeedbackReceived]]:
    """Return the session's feedback, checked before anything is stored.

    An id that is not given follows from session and signal, so that what is sent again is known.
    """
    if len(body.outcome) > NUM_SIGNALS_MAX:
        raise invalid(f"expected at most {NUM_SIGNALS_MAX} signals", "outcome")
    found: list[tuple[FeedbackBody, FeedbackReceived]] = []
    for index, each in enumerate(body.outcome):
        if each.request_id or each.session_id:
            text = "expected neither request_id nor session_id: it is of this session"
            raise invalid(text, f"outcome[{index}]")
        name = each.name or each.key or each.metric_name
        given = msgspec.structs.replace(
            each,
            request_id=request_id,
            feedback_id=each.feedback_id or f"{request_id}-{name}",
            user=each.user or body.user,
        )
        if any(given.feedback_id == other.feedback_id for other, _ in found):
            text = f"a second {name!r}: expected a feedback_id of its own"
            raise invalid(text, f"outcome[{index}].feedback_id")
        found.append((given, await check_feedback(services, client.key, given)))
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
        Answered(
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
