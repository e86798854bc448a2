"""One reply from any available generator: retried and resumed, token by token on record.

A generator that goes away is not the user's trouble: the next attempt continues after the tokens
that are out already, possibly under a newer policy version; the version spans say which token came
from which.
"""

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from itertools import chain

import msgspec
import numpy as np

from penstock.actors.policy.replicas.client import stream_chunks
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.sampling import SampledTokens
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.in_progress import generate_item
from penstock.gateway.arms import Route
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import ApiError
from penstock.kernels.arrays import to_array
from penstock.messages.control import ItemCharged
from penstock.messages.errors import BusError, DeadlineError, PenstockError, RemoteCallError
from penstock.messages.generation import AbortGeneration, Generate
from penstock.messages.retries import RetryPolicy
from penstock.messages.rollout import StopReason
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.task import Purpose, Sampling

PAUSE_S_MAX = 4.0
ABORT_S = 2.0
_REFUSALS: dict[str, tuple[int, str]] = {
    RemoteErrorKind.INVALID: (400, "invalid_value"),
    RemoteErrorKind.TOO_LONG: (400, "context_length_exceeded"),
    RemoteErrorKind.CHARGED: (500, "request_failed"),
}
"""Failures that no other attempt helps: status and code."""


class Generation:
    """One request to the generators, over all its attempts."""

    def __init__(
        self,
        request_id: str,
        session_id: str,
        context_ids: list[int],
        sampling: Sampling,
        *,
        is_named: bool = True,
    ) -> None:
        self.request_id = request_id
        self._is_named = is_named
        self.session_id = session_id
        self.context_ids = context_ids
        self.sampling = sampling
        self.route = Route(channel="")
        """The session's arm; set by the exchange."""
        self.channel = ""
        """Whose replicas were asked last."""
        self.sampled = SampledTokens()
        self.num_attempts = 0
        self._is_stopped = False

    async def stream(
        self, ctx: Context, config: GatewayConfig, replicas: ReplicaTable
    ) -> AsyncGenerator[list[int], None]:
        """Yield the ids of each chunk as it comes; `sampled` holds all that is known of them.

        Raises:
            ApiError: 400 where the generator refuses the request, 500 where it failed at this very
                request (which is not tried again: it may be the cause), 503 where none answers.

        """
        cause: Exception | None = None
        asked: set[str] = set()
        retry = RetryPolicy(
            pause_s=config.retry_s,
            pause_s_max=PAUSE_S_MAX,
            num_attempts_max=config.num_attempts_max,
        )
        for pause_s in chain([0.0], retry.pauses()):
            await ctx.sleep(pause_s)
            if self.num_attempts:
                await self._check_charges(ctx)
            self.num_attempts += 1
            try:
                reason = f"reply to {self.request_id}, attempt {self.num_attempts}"
                self.channel = self._channel(config, replicas, asked)
                request = self._request(config)
                if not self._is_named:
                    replicas.place(self.session_id, Purpose.LIVE, self.channel)
                chunks = stream_chunks(
                    ctx, replicas, request, asked, idle_s=config.idle_s_max, reason=reason
                )
                async with aclosing(chunks):
                    async for chunk in chunks:
                        if ids := self.sampled.add(chunk):
                            yield ids
            except RemoteCallError as error:
                if error.kind in _REFUSALS:
                    status, code = _REFUSALS[error.kind]
                    raise ApiError(status, code, error.text) from error
                cause = error
            except (DeadlineError, BusError) as error:
                cause = error
            if self._is_complete():
                return
        raise ApiError(
            503, "no_generator", f"no generator answered: {cause}", retry_after_s=2.0
        ) from cause

    async def _check_charges(self, ctx: Context) -> None:
        """See that no generator died with the last attempt in progress.

        Raises:
            ApiError: 500: the request may be the cause, so nobody gets it again.

        """
        charged = None
        with suppress(BusError, DeadlineError):
            charged = await ctx.last(ItemCharged, f"{generate_item(self.request_id)}.1")
        if charged is not None:
            text = f"a generator failed with this request in progress: {charged.cause}"
            raise ApiError(500, "request_failed", text)

    async def stop(self, ctx: Context) -> None:
        """End the reply here: the stream gives what the generator has sampled meanwhile, and ends.

        So the record has all of it, with the routes of the whole turn.
        """
        if not self._is_stopped and not self._is_complete():
            await self.abort(ctx)
        self._is_stopped = True

    async def abort(self, ctx: Context) -> None:
        """Report that nobody waits for the rest; where that fails, the rest is waste."""
        if self.sampled.replica and not self._is_complete():
            service = f"abort.{self.sampled.replica}"
            message = AbortGeneration(request_id=self._attempt_id)
            with suppress(PenstockError):
                await ctx.request(service, message, deadline_s=ABORT_S, reason="abort")

    @property
    def _attempt_id(self) -> str:
        return f"{self.request_id}.{self.num_attempts}"

    def _channel(
        self, config: GatewayConfig, replicas: ReplicaTable, asked: Collection[str]
    ) -> str:
        """Return the arm's channel, or the gateway's own where nobody else serves the arm's now.

        A candidate's replicas may be lost in the middle of an experiment; their users are answered
        all the same. The variant stays what was drawn, so that the comparison stays fair.
        """
        drawn = self.route.channel
        if not drawn:
            return config.channel
        left = [one for one in replicas.ready(Purpose.LIVE, drawn) if one.replica not in asked]
        return drawn if left else config.channel

    def _request(self, config: GatewayConfig) -> Generate:
        sampled = self.sampled.token_ids
        left = self.sampling.num_tokens_max - len(sampled)
        ids = np.asarray([*self.context_ids, *sampled], dtype=np.int32)
        return Generate(
            request_id=self._attempt_id,
            session_id=self.session_id,
            purpose=Purpose.LIVE,
            channel=self.channel,
            token_ids=to_array(ids),
            sampling=msgspec.structs.replace(self.sampling, num_tokens_max=left),
            num_resumed=len(sampled),
            deadline_s=config.request_s_max,
        )

    def _is_complete(self) -> bool:
        if self._is_stopped:
            self.sampled.stop_reason = StopReason.STOP
        if len(self.sampled.token_ids) >= self.sampling.num_tokens_max:
            self.sampled.stop_reason = self.sampled.stop_reason or StopReason.LENGTH
        return self.sampled.stop_reason in {StopReason.STOP, StopReason.LENGTH}
