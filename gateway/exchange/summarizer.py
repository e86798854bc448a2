"""Summarizes a session until it fits the context window; each summary is a turn on record."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from penstock.actors.policy.chat.summary import NoSummaryError, as_summary, read_summary
from penstock.actors.policy.summaries import SummaryMode
from penstock.gateway.answering import EXTRA_HEADERS, REQUEST_ID
from penstock.gateway.conversation import LiveRequest
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.choice import Choice
from penstock.gateway.exchange.plan import Plan, TokenCharge
from penstock.gateway.exchange.sessions import Thread
from penstock.gateway.exchange.summaries import SummaryCoverage, asking, ends, shortened
from penstock.gateway.keys import KeySpec
from penstock.gateway.record import Requester, consent_of
from penstock.gateway.services import THREAD, Owner, Services

log = logging.getLogger(__name__)

HEADER = "X-Penstock-Summaries"
"""Request header: `auto` allows summaries of a session that outgrows the context window. Response
header: the number of summaries that the session has had."""
NUM_SUMMARIES_MAX = 4
"""Maximum summaries to sample for one request."""
PlanOf = Callable[[LiveRequest], Awaitable[Plan]]
"""Plans a conversation without summarizing it."""


def allows_summaries(request: web.Request, key: KeySpec) -> bool:
    """Return whether the client allows summaries of a request's session.

    Raises:
        ApiError: 400, the header says anything but `auto`.

    """
    given = request.headers.get(HEADER, "")
    if given not in {"", "auto"}:
        raise ApiError(400, "invalid_value", f'expected "auto", got {given[:32]!r}', HEADER)
    return key.summarizes or bool(given)


class Summarizer:
    """Plans one request whose session may be summarized before it is answered.

    Args:
        services: What the endpoints share.
        request: HTTP request; has its id, thread and extra headers.
        key: Key of the request.
        charge: Tokens to charge to the key; summaries are added.
        plan_of: Plans a conversation without summarizing it.

    """

    def __init__(
        self,
        services: Services,
        request: web.Request,
        key: KeySpec,
        charge: TokenCharge,
        plan_of: PlanOf,
    ) -> None:
        self._services = services
        self._request = request
        self._key = key
        self._charge = charge
        self._plan_of = plan_of
        self._thread: Thread = request[THREAD]
        self._session_key = (self._thread.owner, self._thread.name)
        self._num_spent = 0
        self._num_sampled = 0

    async def plan(self, conversation: LiveRequest) -> Plan:
        """Return the plan of a conversation, after as many summaries as it takes to fit.

        Raises:
            ApiError: The request is refused, or a summary could not be sampled.

        """
        try:
            return await self._plan(conversation)
        finally:
            self._charge.num_tokens += self._num_spent

    async def _plan(self, conversation: LiveRequest) -> Plan:
        services = self._services
        window = services.config.context_tokens_max
        # A session that comes in whole, as after a restart, may need several: each one covers as
        # much as fits the window.
        for _ in range(NUM_SUMMARIES_MAX):
            covered = services.summaries.get(self._session_key, conversation.messages)
            plan = await self._fitting(shortened(conversation, covered))
            if plan is not None and not services.summary.is_due(len(plan.context_ids), window):
                break
            if not await self._summarize(conversation, covered):
                break
        covered = services.summaries.get(self._session_key, conversation.messages)
        plan = await self._plan_of(shortened(conversation, covered))
        if covered.count:
            self._request[EXTRA_HEADERS][HEADER.lower()] = str(covered.count)
        return plan._replace(chain=covered.chain)

    async def _fitting(self, conversation: LiveRequest) -> Plan | None:
        """Return a plan; None if the conversation does not fit the context window."""
        try:
            return await self._plan_of(conversation)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None

    async def _summarize(self, conversation: LiveRequest, covered: SummaryCoverage) -> bool:
        """Summarize as many messages as fit the context window; return whether it succeeded."""
        found = await self._longest(conversation, covered)
        if found is None:
            log.debug("request %s: no part can be summarized", self._request[REQUEST_ID])
            return False
        end, summary_request, plan = found
        self._num_sampled += 1
        name = f"{self._request[REQUEST_ID]}-s{self._num_sampled}"
        choice = Choice(0, name, summary_request, plan, self._services.chat_format)
        client = await self._client(conversation)
        services = self._services
        choice.generation.route = services.arms.route(client.user, services.ctx.now())
        try:
            await self._sample(choice)
        finally:
            # As for replies: sampled tokens are recorded even if the client disconnects.
            chain, text = await asyncio.shield(self._record(choice, plan, client, covered))
        if not text:
            log.warning("request %s: its summary %s is malformed", self._request[REQUEST_ID], name)
            return False
        log.debug("request %s: %d messages are summarized", self._request[REQUEST_ID], end)
        first = conversation.messages[:end]
        services.summaries.put(
            self._session_key,
            SummaryCoverage(
                num_messages=end,
                digest=Thread(self._thread.owner, first).digest,
                summary=text,
                count=covered.count + 1,
                chain=chain,
            ),
        )
        return True

    async def _longest(
        self, conversation: LiveRequest, covered: SummaryCoverage
    ) -> tuple[int, LiveRequest, Plan] | None:
        """Return the longest summary request that fits: its message count, itself and its plan.

        None if not even the shortest one fits.
        """
        config, summary = self._services.config, self._services.summary
        num_reply = min(summary.num_tokens_max, config.reply_tokens_max)
        best = None
        left = ends(conversation, covered)
        # Binary search, as each try tokenizes a prompt. It starts with all messages, which usually
        # fit: a session is summarized as soon as it nears the bound.
        index = len(left) - 1
        while left:
            args = (left[index], summary.request, summary.num_tokens_max)
            summary_request = asking(conversation, covered, *args)
            plan = await self._fitting(summary_request)
            # The summary must have its full length left, too.
            if plan is None or plan.sampling.num_tokens_max < num_reply:
                left = left[:index]
            else:
                best, left = (left[index], summary_request, plan), left[index + 1 :]
            index = len(left) // 2
        return best

    async def _sample(self, choice: Choice) -> None:
        services = self._services
        chunks = choice.generation.stream(services.ctx, services.config, services.replicas)
        try:
            async with asyncio.timeout(services.config.request_s_max):
                async with contextlib.aclosing(chunks):
                    async for _ in chunks:
                        pass
        except TimeoutError as error:
            text = "the summary of the session did not finish in time"
            raise ApiError(504, "deadline_exceeded", text) from error
        finally:
            await choice.generation.abort(services.ctx)

    async def _record(
        self, choice: Choice, plan: Plan, client: Requester, covered: SummaryCoverage
    ) -> tuple[str, str]:
        """Store the sampled summary; return its chain and its text, which is empty if malformed.

        Raises:
            ApiError: 503, the record cannot be stored.

        """
        if not choice.token_ids:
            return "", ""
        services, now = self._services, self._services.ctx.monotonic()
        self._num_spent += len(plan.context_ids) + len(choice.token_ids)
        chain, _ = services.sessions.settle(
            self._thread,
            choice.request_id,
            plan.context_ids,
            choice.token_ids,
            now,
            continues=covered.chain,
        )
        text, fault = "", ""
        try:
            text = read_summary(
                services.chat_format, choice.token_ids, plan.context_ids, plan.tools
            )
        except NoSummaryError as error:
            # Recorded all the same: what a policy sampled is training data, good or bad.
            fault = str(error)
        answered = choice.answered(client, chain, at=services.ctx.now())
        is_withheld = services.summary.mode is SummaryMode.MASKED
        turn = as_summary(answered.turn, fault, is_withheld=is_withheld)
        owner = Owner(tenant=client.key.tenant, user=client.user, is_stored=client.consent.storage)
        services.index.put(choice.request_id, owner, plan.session_id)
        await services.recorder.record(msgspec.structs.replace(answered, turn=turn))
        return chain, text

    async def _client(self, conversation: LiveRequest) -> Requester:
        tenant, user = self._thread.owner
        return Requester(
            key=self._key,
            user=user,
            consent=consent_of(self._key, conversation.store, conversation.metadata),
            erasures=await self._services.num_erasures(tenant, user),
        )
