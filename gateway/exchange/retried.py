"""Idempotent retries: requests that repeat an `Idempotency-Key`, at this gateway or another.

```
 first request ──claim──▶ answered ──reply kept──▶ retry: the same reply, nothing is sampled
                      └─▶ failed, or no consent to store ──claim released──▶ retry: like a first one
 retry meanwhile ──waits──▶ for the reply, or takes over the claim if its gateway died
```
Claims and replies are kept for ten minutes in the memory of the event server (`Stream.GATEWAY`). A
reply is encrypted with the key of its user; after that user is erased, a retry counts as a first
request. A reply that may not be stored is not kept.
"""

import logging
from collections.abc import Mapping

from aiohttp import web

from penstock.gateway.answering import REQUEST_ID
from penstock.gateway.errors import ApiError
from penstock.gateway.keys import KeySpec
from penstock.gateway.record import Requester
from penstock.gateway.services import Services
from penstock.messages.errors import CodecError, ErasedError, PenstockError
from penstock.messages.feedback import owner_of
from penstock.messages.reading.sealed import Sealed
from penstock.messages.requests.gateways import ReplyKept
from penstock.messages.telemetry import ActorReported

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "x-penstock-replayed"
KEY_CHARS_MAX = 256
"""Maximum length of an `Idempotency-Key`."""
REPLY_BYTES_MAX = 256 << 10
"""Maximum size of a reply that is kept: the event server holds it in memory."""
_KEPT_HEADERS = ("Content-Type", "x-policy-version")
POLL_S = 0.1
"""Seconds between looks for the reply of the first request."""
SILENT_S = 5.0
"""Silence after which a gateway counts as dead; actors report once a second."""


class _ClaimHeldError(Exception):
    """Another request holds the claim."""

    def __init__(self, kept: ReplyKept) -> None:
        super().__init__()
        self.kept = kept


class IdempotentRequest:
    """One request with an `Idempotency-Key`."""

    def __init__(self, services: Services, key: KeySpec, request: web.Request, body: bytes) -> None:
        """Identify the request by its key, path and body.

        Args:
            services: What the endpoints share.
            key: Bearer key of the request.
            request: HTTP request with the header.
            body: Complete body of the request.

        Raises:
            ApiError: 400, the header is empty or too long.

        """
        given = request.headers[HEADER]
        if not 0 < len(given) <= KEY_CHARS_MAX:
            raise ApiError(
                400, "invalid_value", f"expected 1 to {KEY_CHARS_MAX} characters", HEADER
            )
        self._services = services
        self._request = request
        # Keyed: a body, or a client's choice of key, must not be guessed from what is stored.
        digest = services.pseudonyms.digest
        self._name = digest(key.tenant.encode(), given.encode("utf-8", "surrogateescape"))
        self._request_digest = digest(request.path.encode(), key.key_id.encode(), body)

    async def claim(self) -> web.Response | None:
        """Claim the request, or return the reply that an earlier one got.

        Returns:
            None once this request holds the claim; it must then `keep` a reply or `give_up`.

        Raises:
            ApiError: 409, the key was used for another request, or the first one takes too long.

        """
        ctx = self._services.ctx
        give_up_at = ctx.monotonic() + self._services.config.request_s_max
        # A state that may be replaced. Compared as a whole: if another retry took the claim over
        # meanwhile, the state differs, and this one goes on waiting.
        void: ReplyKept | None = None

        def claimed(before: ReplyKept | None) -> ReplyKept:
            if before is not None and before.holder and before != void:
                raise _ClaimHeldError(before)
            return self._state(holder=ctx.actor)

        while True:
            try:
                await ctx.change(ReplyKept, self._name, claimed)
            except _ClaimHeldError as held:
                if held.kept.request_digest != self._request_digest:
                    text = "this key was used for another request: expected a new one"
                    raise ApiError(409, "idempotency_key_reused", text, HEADER) from None
                if held.kept.reply is not None:
                    try:
                        return await self._replayed(held.kept, held.kept.reply)
                    except (ErasedError, CodecError):
                        void = held.kept
                        continue
                if await self._is_abandoned(held.kept):
                    log.warning("taking over a request of %s, which died", held.kept.holder)
                    void = held.kept
                    continue
                if ctx.monotonic() > give_up_at:
                    text = "the first request with this key is still in progress"
                    raise ApiError(409, "request_in_progress", text, HEADER, 1.0) from None
                await ctx.sleep(POLL_S)
            else:
                return None

    async def keep(self, reply: bytes, headers: Mapping[str, str], client: Requester) -> bool:
        """Keep the reply for retries; return False if it is too long or cannot be stored.

        Args:
            reply: Body of the response.
            headers: Headers of the response.
            client: Who made the request.

        """
        if not 0 < len(reply) <= REPLY_BYTES_MAX:
            return False
        shown = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        services, owner = self._services, owner_of(client.key.tenant, client.user)
        try:
            state = self._state(
                holder=services.ctx.actor,
                reply=await services.vault.seal(owner, self._name, reply, since=client.erasures),
                headers=shown | {"x-request-id": self._request[REQUEST_ID]},
            )
            await services.ctx.change(ReplyKept, self._name, lambda _: state)
        except PenstockError as error:
            # The client has its reply; only a retry has to be sampled again.
            log.warning("reply %s is not kept for retries: %s", self._request[REQUEST_ID], error)
            return False
        return True

    async def give_up(self) -> None:
        """Release the claim, so that a retry is answered like a first request."""
        try:
            state = self._state(holder="")
            await self._services.ctx.change(ReplyKept, self._name, lambda _: state)
        except PenstockError as error:
            # Retries wait in vain then, until the claim expires.
            log.warning("the claim of %s is not released: %s", self._request[REQUEST_ID], error)

    def _state(
        self, *, holder: str, reply: Sealed | None = None, headers: dict[str, str] | None = None
    ) -> ReplyKept:
        return ReplyKept(
            name=self._name,
            request_digest=self._request_digest,
            holder=holder,
            at=self._services.ctx.now(),
            reply=reply,
            headers=headers or {},
        )

    async def _replayed(self, kept: ReplyKept, reply: Sealed) -> web.Response:
        """Return the response of the first request.

        Raises:
            ErasedError: The user was erased since then.
            CodecError: The reply was encrypted for something else.

        """
        body = await self._services.vault.open(reply, self._name)
        # Under its first id: that is the one on record, which feedback must name.
        self._request[REQUEST_ID] = kept.headers["x-request-id"]
        return web.Response(body=body, headers=kept.headers | {REPLAYED_HEADER: "true"})

    async def _is_abandoned(self, kept: ReplyKept) -> bool:
        """Return whether the gateway that holds the claim died or restarted since it claimed."""
        report = await self._services.ctx.last(ActorReported, kept.holder)
        now = self._services.ctx.now()
        # A gateway that has just started may claim before its first report.
        if report is None or now - report.at > SILENT_S:
            return now - kept.at > SILENT_S
        return report.at - report.uptime_s > kept.at
