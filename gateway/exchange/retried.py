"""Requests that a client sends again under one `Idempotency-Key`, to this gateway or another.

```
 first ──claim──▶ answered ──reply kept──▶ again: the same reply, no token is sampled
              └─▶ failed, or not to be stored ──claim given up──▶ again: as a first one
 again, meanwhile ──waits──▶ for the reply; for the claim, if its gateway is gone
```
Claims and replies are in the event server's memory, for ten minutes (`Stream.GATEWAY`). A reply
is sealed under its user's content key: where that was erased meanwhile, the request is answered as
a first one. A reply that its key or its request wants unstored is not kept.
"""

import contextlib
from collections.abc import Mapping
from hashlib import blake2b

from aiohttp import web

from penstock.gateway.errors import ApiError
from penstock.gateway.keys import KeySpec
from penstock.gateway.services import REQUEST_ID, Services
from penstock.messages.errors import CodecError, ErasedError, PenstockError
from penstock.messages.reading.sealed import Sealed
from penstock.messages.requests.gateways import ReplyKept
from penstock.messages.telemetry import ActorReported

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "x-penstock-replayed"
KEY_CHARS_MAX = 256
REPLY_BYTES_MAX = 256 << 10
_KEPT_HEADERS = ("Content-Type", "x-policy-version")
POLL_S = 0.1
SILENT_S = 5.0
"""Actors report once a second: one that is silent for so long is gone."""


class _TakenError(Exception):
    """Another request holds the claim."""

    def __init__(self, kept: ReplyKept) -> None:
        super().__init__()
        self.kept = kept


class Retried:
    """One request with an `Idempotency-Key`."""

    def __init__(self, services: Services, key: KeySpec, request: web.Request, body: bytes) -> None:
        """Args: `body` is the request's, whole.

        Raises:
            ApiError: 400, the key is too long.

        """
        given = request.headers[HEADER]
        if not 0 < len(given) <= KEY_CHARS_MAX:
            raise ApiError(
                400, "invalid_value", f"expected 1 to {KEY_CHARS_MAX} characters", HEADER
            )
        self._services = services
        self._request = request
        self._name = _digest(key.tenant.encode(), given.encode("utf-8", "surrogateescape"))
        self._request_digest = _digest(request.path.encode(), key.key_id.encode(), body)

    async def claim(self) -> web.Response | None:
        """Take the request up, or return the reply that it got before.

        Raises:
            ApiError: 409, the key stands for another request, or that one takes too long.

        """
        ctx = self._services.ctx
        give_up_at = ctx.monotonic() + self._services.config.request_s_max
        gone: ReplyKept | None = None

        def claimed(before: ReplyKept | None) -> ReplyKept:
            if before is not None and before.holder and before != gone:
                raise _TakenError(before)
            return self._state(holder=ctx.actor)

        while True:
            try:
                await ctx.change(ReplyKept, self._name, claimed)
            except _TakenError as taken:
                if taken.kept.request_digest != self._request_digest:
                    text = "this key was used for another request"
                    raise ApiError(409, "idempotency_key_reused", text, HEADER) from None
                if taken.kept.reply is not None:
                    try:
                        return await self._replayed(taken.kept, taken.kept.reply)
                    except (ErasedError, CodecError):
                        gone = taken.kept
                        continue
                if await self._is_gone(taken.kept):
                    gone = taken.kept
                    continue
                if ctx.monotonic() > give_up_at:
                    text = "the first request under this key is in progress still"
                    raise ApiError(409, "request_in_progress", text, HEADER, 1.0) from None
                await ctx.sleep(POLL_S)
            else:
                return None

    async def keep(self, reply: bytes, headers: Mapping[str, str], owner: str) -> bool:
        """Have the reply sent again to a client that asks again; False where it is too long.

        Args:
            reply: Its body.
            headers: Its headers.
            owner: `<tenant>/<user>` whose request it is.

        """
        if not 0 < len(reply) <= REPLY_BYTES_MAX:
            return False
        shown = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        services = self._services
        try:
            state = self._state(
                holder=services.ctx.actor,
                reply=await services.vault.seal(owner, self._name, reply),
                headers=shown | {"x-request-id": self._request[REQUEST_ID]},
            )
            await services.ctx.change(ReplyKept, self._name, lambda _: state)
        except PenstockError:
            return False  # The user has the reply; it is only not sent again.
        return True

    async def give_up(self) -> None:
        """Have a client that asks again answered as at first."""
        with contextlib.suppress(PenstockError):
            state = self._state(holder="")
            await self._services.ctx.change(ReplyKept, self._name, lambda _: state)

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
        """Return the reply of before.

        Raises:
            ErasedError: Its user was erased since.
            CodecError: It was sealed for something else.

        """
        body = await self._services.vault.open(reply, self._name)
        self._request[REQUEST_ID] = kept.headers["x-request-id"]
        return web.Response(body=body, headers=kept.headers | {REPLAYED_HEADER: "true"})

    async def _is_gone(self, kept: ReplyKept) -> bool:
        """Whether the gateway that answers is dead, or was started again since."""
        report = await self._services.ctx.last(ActorReported, kept.holder)
        now = self._services.ctx.now()
        if report is None or now - report.at > SILENT_S:
            return now - kept.at > SILENT_S
        return report.at - report.uptime_s > kept.at


def _digest(*parts: bytes) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
