"""Samples, sends and records the replies of one request, whatever its route."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable
from typing import NamedTuple

from aiohttp import web

from penstock.gateway.answering import EXTRA_HEADERS, REQUEST_ID
from penstock.gateway.conversation import Opening, ParsedRequest
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.choice import Choice
from penstock.gateway.exchange.plan import Plan
from penstock.gateway.exchange.sessions import PrefixKind
from penstock.gateway.keys import KeySpec
from penstock.gateway.record import Requester, consent_of
from penstock.gateway.services import THREAD, Owner, Services
from penstock.messages.feedback import owner_of
from penstock.messages.gates import NO_VARIANT

log = logging.getLogger(__name__)
_NUM_UPDATES_MAX = 16
"""Maximum chunks of several choices that wait for a slow client; then generation waits, too."""
_Update = tuple[Choice, list[int]]


class KeptReply(NamedTuple):
    """Body of a reply that may be kept for retries, and whose it is."""

    body: bytes
    client: Requester


class Exchange:
    """One request and its replies."""

    def __init__(  # noqa: PLR0913 - independent inputs, known only for each request
        self,
        services: Services,
        request: web.Request,
        key: KeySpec,
        asked: ParsedRequest,
        plan: Plan,
        *,
        erasures: int = 0,
        keeps: bool = False,
    ) -> None:
        """Prepare the replies; nothing is sampled before `answer`.

        Args:
            services: What the endpoints share.
            request: HTTP request; has its id, thread and extra headers.
            key: Key of the request.
            asked: Parsed body.
            plan: Context and sampling parameters.
            erasures: Erasures of the user before the request.
            keeps: Whether to keep the reply, also of a stream, for `kept_reply`.

        """
        self._services = services
        self._request = request
        self._conversation = asked.conversation
        self._plan = plan
        conversation = asked.conversation
        self._client = Requester(
            key=key,
            user=services.pseudonyms.user(key, conversation.user),
            consent=consent_of(key, conversation.store, conversation.metadata),
            erasures=erasures,
        )
        route = services.arms.route(self._client.user, services.ctx.now())
        name = request[REQUEST_ID]
        self.choices = [
            Choice(
                index,
                f"{name}-{index}" if index else name,
                asked.conversation,
                plan,
                services.chat_format,
            )
            for index in range(asked.conversation.num_choices)
        ]
        for choice in self.choices:
            choice.generation.route = route
        now = services.ctx.now()
        tokenizer = services.chat_format.tokenizer
        opening = Opening(name, now, asked.conversation, plan.context_ids, tokenizer)
        self._writer = asked.writer(opening)
        self._started = services.ctx.monotonic()
        self._has_token = False
        self._kept: list[bytes] | None = [] if keeps else None

    def kept_reply(self, response: web.StreamResponse) -> KeptReply | None:
        """Return the body of the response for a later replay; None if it may not be kept."""
        if self._kept is None:
            return None
        body = response.body if isinstance(response, web.Response) else b"".join(self._kept)
        return KeptReply(body, self._client) if isinstance(body, bytes) else None

    async def answer(self) -> web.StreamResponse:
        """Sample, reply and record; sampled tokens are recorded however the request ends.

        Raises:
            ApiError: The request failed before any of the reply was sent.

        """
        try:
            if self._conversation.is_streamed:
                return await self._stream()
            return await self._whole()
        finally:
            self._observe()
            # A client that disconnects cancels this task, and its tokens are recorded all the same.
            await asyncio.shield(self._settle())
            self._log_end()

    async def _whole(self) -> web.Response:
        try:
            async with self._deadline(), contextlib.aclosing(self._updates()) as updates:
                async for choice, ids in updates:
                    await self._take(choice, ids)
        except TimeoutError as error:
            raise _too_late() from error
        for choice in self.choices:
            choice.close()
        # Before the reply: feedback may follow at once, and no reply goes out unrecorded.
        await self._record()
        return web.Response(
            body=self._writer.whole(self.choices),
            content_type="application/json",
            headers=self._headers(),
        )

    async def _stream(self) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            async with self._deadline(), contextlib.aclosing(self._updates()) as updates:
                async for choice, ids in updates:
                    # Not earlier: a failure before the first token still has its own HTTP status.
                    response = response or await self._open()
                    await self._send(response, await self._take(choice, ids))
        except (ApiError, TimeoutError) as error:
            failure = error if isinstance(error, ApiError) else _too_late()
            if response is None:
                raise failure from error
            return await self._broken(response, failure)
        response = response or await self._open()
        for choice in self.choices:
            await self._send(response, self._writer.deltas(choice, choice.close()))
        # Before the last events: a client that sees the end marker may rely on the record.
        try:
            await self._record()
        except ApiError as error:
            return await self._broken(response, error)
        await self._send(response, self._writer.end(self.choices))
        return response

    async def _take(self, choice: Choice, ids: list[int]) -> Iterable[bytes]:
        """Take new ids of a choice; end the choice if they complete a stop text."""
        if not self._has_token:
            self._has_token = True
            elapsed = self._services.ctx.monotonic() - self._started
            self._services.metrics.first_token_s.observe(elapsed)
        deltas = choice.push(ids)
        # Stop texts span tokens in any way, so the engine cannot watch for them by token id.
        if choice.stop_text:
            await choice.generation.stop(self._services.ctx)
        return self._writer.deltas(choice, deltas) if self._conversation.is_streamed else ()

    async def _updates(self) -> AsyncGenerator[_Update, None]:
        """Yield new ids of all choices as they arrive."""
        if len(self.choices) == 1:
            (choice,) = self.choices
            async with contextlib.aclosing(self._tokens(choice)) as chunks:
                async for ids in chunks:
                    yield choice, ids
            return
        # Choices are sampled concurrently; None in the queue means that one of them ended.
        queue: asyncio.Queue[_Update | None] = asyncio.Queue(_NUM_UPDATES_MAX)
        tasks = [asyncio.ensure_future(self._feed(choice, queue)) for choice in self.choices]
        try:
            num_open = len(tasks)
            while num_open:
                update = await queue.get()
                if update is None:
                    num_open -= 1
                else:
                    yield update
            # Raises the first failure: only now, after all choices have ended.
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, choice: Choice, queue: asyncio.Queue[_Update | None]) -> None:
        try:
            async with contextlib.aclosing(self._tokens(choice)) as chunks:
                async for ids in chunks:
                    await queue.put((choice, ids))
        finally:
            await queue.put(None)

    def _tokens(self, choice: Choice) -> AsyncGenerator[list[int], None]:
        services = self._services
        return choice.generation.stream(services.ctx, services.config, services.replicas)

    def _deadline(self) -> asyncio.Timeout:
        return asyncio.timeout(self._services.config.request_s_max)

    async def _open(self) -> web.StreamResponse:
        headers = self._headers() | {"Content-Type": "text/event-stream"}
        # nginx would otherwise buffer the stream until it ends.
        headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        headers["x-request-id"] = self._request[REQUEST_ID]
        response = web.StreamResponse(headers=headers)
        await response.prepare(self._request)
        await self._send(response, self._writer.begin())
        return response

    async def _send(self, response: web.StreamResponse, events: Iterable[bytes]) -> None:
        for event in events:
            if self._kept is not None:
                self._kept.append(event)
            # A client that stops reading must not hold its place, and a generator's, forever.
            async with asyncio.timeout(self._services.config.write_s_max):
                await response.write(event)

    async def _broken(self, response: web.StreamResponse, error: ApiError) -> web.StreamResponse:
        """End a stream that has begun with an error event in the route's format."""
        name = self._request[REQUEST_ID]
        log.warning("request %s failed within its stream: %d %s", name, error.status, error.code)
        # A failed stream must not be replayed to a retry, which deserves a new attempt.
        self._kept = None
        with contextlib.suppress(OSError, TimeoutError):
            await self._send(response, self._writer.fail(error))
        return response

    def _headers(self) -> dict[str, str]:
        extra: dict[str, str] = self._request[EXTRA_HEADERS]
        # In an experiment the version would tell the arm, and who knows it can vote by it.
        if any(choice.generation.route.variant != NO_VARIANT for choice in self.choices):
            return extra
        versions = [choice.generation.sampled.min_policy_version for choice in self.choices]
        return extra | {"x-policy-version": str(min(versions))}

    async def _settle(self) -> None:
        try:
            await self._record()
        except ApiError:
            # No status is left to report it by: the request has ended or failed already.
            log.exception("request %s is not recorded", self._request[REQUEST_ID])
        # Frees the generator at once when the client has gone; a complete reply ignores it.
        for choice in self.choices:
            await choice.generation.abort(self._services.ctx)

    async def _record(self) -> None:
        """Store the record of each reply once.

        Raises:
            ApiError: 503, a record cannot be stored.

        """
        services = self._services
        for choice in self.choices:
            if choice.is_recorded or not choice.token_ids:
                continue
            # Before the first await: `_settle` comes here again and must not store it twice.
            choice.is_recorded = True
            client = self._client
            owner = Owner(
                tenant=client.key.tenant, user=client.user, is_stored=client.consent.storage
            )
            services.index.put(choice.request_id, owner, self._plan.session_id)
            chain = self._settle_session(choice)
            choice.remember(services.planner.memory)
            answered = choice.answered(client, chain, at=services.ctx.now())
            try:
                await services.recorder.record(answered)
            except ApiError:
                services.metrics.unrecorded.inc()
                raise

    def _settle_session(self, choice: Choice) -> str:
        """Add the reply to its session; return the chain that the reply belongs to."""
        services, thread = self._services, self._request[THREAD]
        now, ids = services.ctx.monotonic(), (self._plan.context_ids, choice.token_ids)
        # One choice continues the chain; the others are alternatives that the client may drop.
        continues = "" if choice.index else self._plan.chain
        chain, kind = services.sessions.settle(
            thread, choice.request_id, *ids, now, continues=continues
        )
        choice.starts_segment = bool(self._plan.chain) and kind is not PrefixKind.EXACT
        if kind is not None and not choice.index and not choice.starts_segment:
            services.metrics.prefixes.labels(kind).inc()
        services.sessions.remember(thread, choice.text, choice.sent_calls, now)
        # An erasure during the request has emptied the memory of this user.
        client, owner = self._client, owner_of(*thread.owner)
        is_erased = services.vault.num_erasures_known(owner) != client.erasures
        if self._conversation.keeps_response and client.consent.storage and not is_erased:
            services.responses.put(thread.owner, self._conversation, choice, now)
        return chain

    def _log_end(self) -> None:
        elapsed = self._services.ctx.monotonic() - self._started
        for choice in self.choices:
            generation = choice.generation
            log.debug(
                "request %s ended: %s, %d tokens after %d, %d attempts, %.2f s",
                choice.request_id,
                generation.sampled.stop_reason or "incomplete",
                len(choice.token_ids),
                len(self._plan.context_ids),
                generation.num_attempts,
                elapsed,
            )

    def _observe(self) -> None:
        metrics = self._services.metrics
        metrics.duration_s.observe(self._services.ctx.monotonic() - self._started)
        metrics.tokens.labels("prompt").inc(len(self._plan.context_ids))
        for choice in self.choices:
            metrics.tokens.labels("sampled").inc(len(choice.token_ids))
            metrics.retries.inc(max(0, choice.generation.num_attempts - 1))


def _too_late() -> ApiError:
    return ApiError(504, "deadline_exceeded", "the reply did not finish in time")
