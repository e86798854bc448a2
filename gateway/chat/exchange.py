"""One chat request from its first token to its record."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Container

from aiohttp import web

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools
from penstock.actors.policy.sampling import make_turn
from penstock.gateway.chat.chunks import ReplyWriter
from penstock.gateway.chat.generation import Generation
from penstock.gateway.chat.prompt import offered_tools, told_tools
from penstock.gateway.chat.reply import ReplyAssembler
from penstock.gateway.chat.schema import ChatRequest
from penstock.gateway.errors import ApiError, error_body
from penstock.gateway.keys import KeySpec
from penstock.gateway.reply_facts import reply_facts
from penstock.gateway.services import EXTRA_HEADERS, Services
from penstock.messages.errors import PenstockError
from penstock.messages.feedback import InferenceRecorded


class Exchange:
    """One request and its reply."""

    def __init__(
        self,
        services: Services,
        request: web.Request,
        key: KeySpec,
        chat: ChatRequest,
        generation: Generation,
    ) -> None:
        self._services = services
        self._request = request
        self._key = key
        self._generation = generation
        self._chat = chat
        self._user = services.pseudonyms.user(key, chat.end_user)
        generation.route = services.arms.route(self._user, services.ctx.now())
        tools = offered_tools(chat)
        self._assembler = ReplyAssembler(
            services.chat_format, tools, generation.context_ids, told_tools(chat)
        )
        self._writer = ReplyWriter(
            chat, generation, services.chat_format.tokenizer, tools, services.ctx.now()
        )
        self._started = services.ctx.monotonic()
        self._is_recorded = False

    async def answer(self) -> web.StreamResponse:
        """Sample, reply and record; what was sampled is recorded however the request ends."""
        try:
            if self._chat.stream:
                return await self._stream()
            return await self._whole()
        finally:
            self._observe()
            await asyncio.shield(self._settle())

    async def _whole(self) -> web.Response:
        try:
            async with self._deadline(), contextlib.aclosing(self._chunks()) as chunks:
                async for ids in chunks:
                    self._assembler.push(ids)
        except TimeoutError as error:
            raise _too_late() from error
        self._assembler.finish()
        await self._record()
        return web.Response(
            body=self._writer.whole(self._assembler),
            content_type="application/json",
            headers=self._headers(),
        )

    async def _stream(self) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            async with self._deadline(), contextlib.aclosing(self._chunks()) as chunks:
                async for ids in chunks:
                    if response is None:
                        response = await self._open()
                        await self._send(response, self._writer.opening())
                    for event in self._writer.deltas(self._assembler.push(ids)):
                        await self._send(response, event)
        except (ApiError, TimeoutError) as error:
            failure = error if isinstance(error, ApiError) else _too_late()
            if response is None:
                raise failure from error
            return await self._broken(response, failure)
        response = response or await self._open()
        for event in self._writer.deltas(self._assembler.finish()):
            await self._send(response, event)
        await self._record()
        for event in self._writer.closing(self._assembler):
            await self._send(response, event)
        return response

    async def _chunks(self) -> AsyncGenerator[list[int], None]:
        """Yield ids, timing the first."""
        services, is_first = self._services, True
        async with contextlib.aclosing(
            self._generation.stream(services.ctx, services.config, services.replicas)
        ) as chunks:
            async for ids in chunks:
                if is_first:
                    elapsed = services.ctx.monotonic() - self._started
                    services.metrics.first_token_s.observe(elapsed)
                    is_first = False
                yield ids

    def _deadline(self) -> asyncio.Timeout:
        return asyncio.timeout(self._services.config.request_s_max)

    async def _open(self) -> web.StreamResponse:
        headers = self._headers() | {"Content-Type": "text/event-stream"}
        headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(self._request)
        return response

    async def _send(self, response: web.StreamResponse, event: bytes) -> None:
        async with asyncio.timeout(self._services.config.write_s_max):
            await response.write(b"data: " + event + b"\n\n")

    async def _broken(self, response: web.StreamResponse, error: ApiError) -> web.StreamResponse:
        """End a stream that has begun by an error that the client can read."""
        with contextlib.suppress(OSError, TimeoutError):
            await self._send(response, error_body(error))
        return response

    def _headers(self) -> dict[str, str]:
        version = self._generation.sampled.min_policy_version
        limits: dict[str, str] = self._request[EXTRA_HEADERS]
        return limits | {"x-policy-version": str(version)}

    async def _settle(self) -> None:
        await self._record()
        await self._generation.abort(self._services.ctx)

    async def _record(self) -> None:
        """Publish the record once; a log that is down must not fail the user's request."""
        if self._is_recorded or not self._generation.sampled.token_ids:
            return
        self._is_recorded = True
        services = self._services
        record = inference_record(
            self._generation,
            self._key,
            self._user,
            services.chat_format,
            told_tools(self._chat),
            offered=offered_tools(self._chat),
            text=self._assembler.text,
            at=services.ctx.now(),
        )
        services.index.add(record)
        self._remember()
        try:
            async with asyncio.timeout(services.config.record_s_max):
                await services.ctx.publish(record)
        except (PenstockError, TimeoutError):
            services.metrics.unrecorded.inc()

    def _remember(self) -> None:
        generation, reply = self._generation, self._assembler
        ids = generation.sampled.token_ids
        if ids[-1] in self._services.chat_format.stop_ids:
            self._services.memory.put(generation.session_id, reply.text, reply.calls, ids)

    def _observe(self) -> None:
        metrics, generation = self._services.metrics, self._generation
        metrics.duration_s.observe(self._services.ctx.monotonic() - self._started)
        metrics.tokens.labels("prompt").inc(len(generation.context_ids))
        metrics.tokens.labels("sampled").inc(len(generation.sampled.token_ids))
        metrics.retries.inc(max(0, generation.num_attempts - 1))


def _too_late() -> ApiError:
    return ApiError(504, "deadline_exceeded", "the reply did not end in time")


def inference_record(  # noqa: PLR0913 - what is on record of a request
    generation: Generation,
    key: KeySpec,
    user: str,
    chat_format: ChatFormat,
    tools: OfferedTools,
    *,
    offered: Container[str],
    text: str,
    at: float,
) -> InferenceRecorded:
    """Return the record of a request that got at least one token."""
    sampled, route = generation.sampled, generation.route
    turn = make_turn(chat_format, generation.context_ids, sampled, tools, generation.sampling)
    return InferenceRecorded(
        request_id=generation.request_id,
        session_id=generation.session_id,
        key_id=key.key_id,
        tenant=key.tenant,
        user=user,
        training_consent=key.training_consent,
        variant=route.variant,
        propensity=route.propensity,
        channel=generation.channel,
        facts=reply_facts(
            text,
            turn.calls,
            num_tokens=len(sampled.token_ids),
            offered=offered,
            is_broken=bool(turn.parse_error),
        ),
        recorded_at=at,
        turn=turn,
        policy_version=sampled.min_policy_version,
        replica=sampled.replica,
    )
