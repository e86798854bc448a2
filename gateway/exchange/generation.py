"""Samples one reply from the available generators, with retries that resume where one failed.

Users do not notice a lost generator: the next attempt continues after the tokens that were sent
already, possibly with a newer policy version. The version spans of the record say which version
sampled which tokens.
"""

import logging
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

log = logging.getLogger(__name__)

PAUSE_S_MAX = 4.0
"""Maximum seconds between attempts."""
ABORT_S = 2.0
"""Seconds to wait until a generator confirms an abort."""
_REFUSALS: dict[str, tuple[int, str]] = {
    RemoteErrorKind.INVALID: (400, "invalid_value"),
    RemoteErrorKind.TOO_LONG: (400, "context_length_exceeded"),
    RemoteErrorKind.CHARGED: (500, "request_failed"),
}
"""Failures that a retry cannot fix, with the HTTP status and code to return."""


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
        """Prepare; nothing is sampled before `stream`.

        Args:
            request_id: Id of the reply; each attempt adds its number.
            session_id: Pseudonym of the session, which decides on the replica.
            context_ids: Token ids of the prompt.
            sampling: Sampling parameters.
            is_named: Whether the client named the session, and may continue it elsewhere.

        """
        self.request_id = request_id
        self._is_named = is_named
        self.session_id = session_id
        self.context_ids = context_ids
        self.sampling = sampling
        self.route = Route(channel="")
        """Route of the session; set by the exchange."""
        self.channel = ""
        """Channel of the replica that was asked last."""
        self.sampled = SampledTokens()
        self.num_attempts = 0
        self._is_stopped = False

    async def stream(
        self, ctx: Context, config: GatewayConfig, replicas: ReplicaTable
    ) -> AsyncGenerator[list[int], None]:
        """Yield the ids of each chunk as it arrives; `sampled` collects them with their logprobs.

        Raises:
            ApiError: 400, the generator refuses the request; 500, a generator failed while it
                served this request; 503, no generator answered.

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
                log.warning(
                    "request %s: attempt %d after %d tokens, the last one failed: %r",
                    self.request_id,
                    self.num_attempts + 1,
                    len(self.sampled.token_ids),
                    cause,
                )
                await self._check_charges(ctx)
            self.num_attempts += 1
            try:
                reason = f"reply to {self.request_id}, attempt {self.num_attempts}"
                self.channel = self._channel(config, replicas, asked)
                request = self._request(config)
                # Only this gateway knows an unnamed session, so it may pick the least loaded
                # replica. A named one goes where its hash says, the same from every gateway.
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
            # Also after an error: the last token may have come before the connection broke.
            if self._is_complete():
                return
        raise ApiError(
            503, "no_generator", f"no generator answered: {cause}", retry_after_s=2.0
        ) from cause

    async def _check_charges(self, ctx: Context) -> None:
        """Refuse another attempt if a generator died while it served this request.

        Raises:
            ApiError: 500, a generator died.

        """
        # The request may be the cause: retried, it could take down one generator after another.
        charged = None
        with suppress(BusError, DeadlineError):
            charged = await ctx.last(ItemCharged, f"{generate_item(self.request_id)}.1")
        if charged is not None:
            log.error("request %s: not retried, a generator died with it", self.request_id)
            text = f"a generator failed with this request in progress: {charged.cause}"
            raise ApiError(500, "request_failed", text)

    async def stop(self, ctx: Context) -> None:
        """End the reply early; the stream still yields what was sampled until the abort."""
        # So the record has every sampled token, with the expert routes of the whole turn.
        if not self._is_stopped and not self._is_complete():
            await self.abort(ctx)
        self._is_stopped = True

    async def abort(self, ctx: Context) -> None:
        """Ask the generator to stop; if it cannot be reached, its further tokens are wasted."""
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
        """Return the channel of the route, or the gateway's own if no replica of it is left."""
        assigned = self.route.channel
        if not assigned:
            return config.channel
        ready = replicas.ready(Purpose.LIVE, assigned)
        # An experiment may lose all replicas of its candidate; their users still get answers. The
        # variant on record stays as drawn: the comparison would be biased otherwise.
        return (
            assigned if any(replica.replica not in asked for replica in ready) else config.channel
        )

    def _request(self, config: GatewayConfig) -> Generate:
        # Tokens of earlier attempts are part of the prompt now.
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
