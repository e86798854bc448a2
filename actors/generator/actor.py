"""The generator: serves `generate.<purpose>.<replica>` from one engine.

    Generate ──▶ engine.generate ──a chunk of tokens under one version──▶ TokensSampled

Weights arrive separately: a receiver in the same process stages and commits them in the engine.
The generator reports what it serves once a second and whenever that changes. Clients and the pacer
rely only on these reports, so a replica may join, leave or get lost at any time.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

import msgspec
import numpy as np
import torch

from penstock.actors.generator.engine import (
    ContextLengthError,
    Engine,
    EngineDiedError,
    EngineNotReadyError,
    InvalidRequestError,
    RequestFailedError,
    TokenChunk,
)
from penstock.actors.generator.lag import Lag
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.kernels.arrays import from_array, to_array
from penstock.kernels.route_segments import seal_routes
from penstock.kernels.support import seal_support
from penstock.messages.base import Event, Message
from penstock.messages.bus import Serve
from penstock.messages.errors import BusError, QueueFullError
from penstock.messages.generation import (
    NEWEST,
    AbortGeneration,
    Generate,
    ReplicaReported,
    TokensSampled,
    pinned_version,
)
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.task import Purpose
from penstock.messages.weights import WeightsApplied, WeightsPublished

log = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 2.0
"""Longest time in seconds to publish one report; the next report follows within a second."""
QUEUE_TICKS = 60
"""Number of ticks over which the queue time is averaged."""


class Generator(Actor):
    """One replica: an engine and the purposes that it serves.

    Args:
        engine: Started engine; a receiver gives it weights.
        purposes: Purposes to serve once the engine has weights.
        region: Region of the replica.
        replica: Name of the replica, unique in the run.
        channel: Channel of weight versions that the receiver follows.
        lag: Limit on how far the weights may fall behind; beyond it the replica stops serving
            training, which continues without it.

    """

    role = "generator"
    tick_s = 1.0
    follows: ClassVar[tuple[type[Event], ...]] = (WeightsPublished, WeightsApplied)

    def __init__(  # noqa: PLR0913 - engine and identity
        self,
        engine: Engine,
        purposes: Sequence[Purpose],
        region: str,
        replica: str,
        *,
        channel: str = NEWEST,
        lag: Lag | None = None,
    ) -> None:
        self._engine = engine
        self._capabilities = engine.capabilities()
        self._purposes = tuple(purposes)
        self._region = region
        self._replica = replica
        self._channel = channel
        self._lag = lag or Lag()
        self._started_at = 0.0
        self._last_report: ReplicaReported | None = None
        self._is_lagging = False
        self._queues_ms: deque[list[float]] = deque([[]], maxlen=QUEUE_TICKS)
        """Queue times of the requests of each recent tick, in milliseconds."""

    def services(self) -> Mapping[str, Serve]:
        """Return one service per purpose and one for aborts, each named after this replica."""
        # Each replica has its own subjects: the client chooses the replica, not the bus.
        serves: dict[str, Serve] = {
            f"generate.{purpose}.{self._replica}": self._generate for purpose in self._purposes
        }
        serves[f"abort.{self._replica}"] = self._abort
        return serves

    def not_ready(self) -> str:
        """Return why the engine cannot serve (it has no weights yet or died); empty if it can."""
        health = self._engine.health()
        return "" if health.ready else health.error or "no weights yet"

    async def start(self, ctx: Context) -> Effects:
        """Note the start time, by which clients know the newest process of this name."""
        self._started_at = ctx.now()
        log.info(
            "will serve %s in region %s on channel %s with engine %s",
            ", ".join(self._purposes),
            self._region,
            self._channel,
            self._capabilities.name,
        )
        return ()

    def processor_s(self) -> Mapping[str, float]:
        """Return CPU seconds used by the engine's own processes, if it has any."""
        used_s = self._engine.metrics().processes_s
        return {"engine": used_s} if used_s else {}

    async def on_weights_published(self, event: WeightsPublished, ctx: Context) -> Effects:
        """Note the newest version, to know how far behind this replica is."""
        self._lag.published(event.policy_version)
        return ()

    async def on_weights_applied(self, event: WeightsApplied, ctx: Context) -> Effects:
        """Report a new version immediately: requests may be waiting for it."""
        if event.replica == self._replica and self._has_changed():
            log.info("serving version %d", self._engine.health().policy_version)
            await self._publish_report(self._report(ctx), ctx)
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Report that this replica is leaving, so that its sessions move immediately."""
        # Without this report, clients would only notice after a time of silence.
        leaving = msgspec.structs.replace(self._report(ctx), serves=[], is_leaving=True)
        await self._publish_report(leaving, ctx)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Report what this replica serves and update the engine's gauges."""
        self._show_gauges(ctx)
        await self._publish_report(self._report(ctx), ctx)
        self._queues_ms.append([])
        return ()

    def _has_changed(self) -> bool:
        last = self._last_report
        return last is None or last.policy_version != self._engine.health().policy_version

    async def _publish_report(self, report: ReplicaReported, ctx: Context) -> None:
        """Publish a report; a failure is only logged, because the next tick reports again."""
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await ctx.publish(report)
        except (BusError, TimeoutError) as error:
            log.warning("report not published, next one in %g s: %r", self.tick_s, error)
        self._last_report = report

    def _report(self, ctx: Context) -> ReplicaReported:
        health = self._engine.health()
        serves = list(self._purposes) if health.ready else []
        is_lagging = self._lag.is_lost(health.policy_version, ctx.monotonic())
        self._note_lagging(is_lagging, health.policy_version)
        # The pacer waits for the oldest version in use, so this replica would stall the whole run.
        if is_lagging:
            serves = [purpose for purpose in serves if purpose is not Purpose.TRAIN]
        return ReplicaReported(
            region=self._region,
            replica=self._replica,
            started_at=self._started_at,
            serves=serves,
            channel=self._channel,
            policy_version=health.policy_version,
            num_requests=health.num_running + health.num_waiting,
            num_running_max=self._capabilities.num_running_max,
            queue_s=self._queue_s(),
        )

    def _note_lagging(self, is_lagging: bool, policy_version: int) -> None:
        if is_lagging and not self._is_lagging:
            log.warning("version %d is too old, no longer serving training", policy_version)
        if self._is_lagging and not is_lagging:
            log.info("caught up at version %d, serving training again", policy_version)
        self._is_lagging = is_lagging

    def _queue_s(self) -> float:
        """Return the mean queue time of the last `QUEUE_TICKS` ticks, in seconds."""
        queues_ms = [queue_ms for tick in self._queues_ms for queue_ms in tick]
        return sum(queues_ms) / len(queues_ms) / 1e3 if queues_ms else 0.0

    def _show_gauges(self, ctx: Context) -> None:
        health, metrics = self._engine.health(), self._engine.metrics()
        gauges = {
            "policy_version": health.policy_version,
            "num_running": health.num_running,
            "num_waiting": health.num_waiting,
            "engine_busy_s": metrics.busy_s,
            "generated_tokens": metrics.num_generated_tokens,
            "drafted_tokens": metrics.num_drafted_tokens,
            "accepted_tokens": metrics.num_accepted_tokens,
            "prefill_tokens": metrics.num_prefill_tokens,
            "cached_tokens": metrics.num_cached_tokens,
            "last_pause_ms": metrics.last_pause_ms,
        }
        for name, value in gauges.items():
            ctx.set_gauge(name, value)
        # Fails the actor: a dead engine does not recover within this process.
        if health.error:
            raise EngineNotReadyError(f"engine of {self._replica} died: {health.error}")

    async def _generate(self, message: Message) -> AsyncIterator[Message]:
        if not isinstance(message, Generate):
            yield _refusal(
                RemoteErrorKind.INVALID, f"expected Generate, got {type(message).__name__}"
            )
            return
        try:
            async with asyncio.timeout(message.deadline_s):
                async for reply in self._replies(message):
                    yield reply
        # Subclasses first: ContextLengthError is an InvalidRequestError, EngineDiedError an
        # EngineNotReadyError. Texts of invalid requests may quote the request, so only the length
        # error is logged in full.
        except ContextLengthError as error:
            log.warning("refused request %s: %s", message.request_id, error)
            yield _refusal(RemoteErrorKind.TOO_LONG, str(error))
        except (RequestFailedError, EngineDiedError) as error:
            log.exception("request %s failed", message.request_id)
            yield _refusal(RemoteErrorKind.CHARGED, str(error))
        except (InvalidRequestError, ValueError) as error:
            log.warning("refused request %s: %s", message.request_id, type(error).__name__)
            yield _refusal(RemoteErrorKind.INVALID, str(error))
        except (QueueFullError, EngineNotReadyError) as error:
            log.warning("refused request %s for now: %s", message.request_id, error)
            yield _refusal(RemoteErrorKind.BUSY, str(error))
        except TimeoutError:
            text = f"request {message.request_id}: not finished within {message.deadline_s:g} s"
            log.warning("%s", text)
            yield _refusal(RemoteErrorKind.FAILED, text)

    async def _replies(self, message: Generate) -> AsyncIterator[TokensSampled]:
        expected, held = pinned_version(message.channel), self._engine.health().policy_version
        # A request pinned to a version may be served from any channel that happens to hold it.
        if held != expected and (expected is not None or message.channel != self._channel):
            raise EngineNotReadyError(
                f"{self._replica}: expected a request for channel {self._channel} or version"
                f" {held}, which this replica serves, got {message.channel}"
            )
        is_first = True
        async for chunk in self._engine.generate(
            from_array(message.token_ids),
            message.sampling,
            request_id=message.request_id,
            session_id=message.session_id,
            routes_from=message.routes_from,
            num_resumed=message.num_resumed,
        ):
            # Every chunk of a request carries its queue time: count it once.
            if is_first:
                self._queues_ms[-1].append(chunk.queue_ms)
                is_first = False
            yield TokensSampled(
                request_id=message.request_id,
                token_ids=to_array(chunk.token_ids),
                behavior_logprobs=to_array(chunk.behavior_logprobs),
                policy_version=chunk.policy_version,
                stop_reason=chunk.stop_reason,
                replica=self._replica,
                queue_ms=chunk.queue_ms,
                route_segments=seal_chunk(chunk, self._capabilities.num_experts),
                arithmetic=self._capabilities.arithmetic,
                support=b"" if chunk.support is None else seal_support(chunk.support),
                forced=_spans(chunk.is_forced),
                top_ids=None if chunk.top_ids is None else to_array(chunk.top_ids),
                top_logprobs=None if chunk.top_logprobs is None else to_array(chunk.top_logprobs),
            )

    async def _abort(self, message: Message) -> AsyncIterator[Message]:
        if isinstance(message, AbortGeneration):
            log.debug("aborting request %s", message.request_id)
            await self._engine.abort(message.request_id)
        yield Ack()


def seal_chunk(chunk: TokenChunk, num_experts: int) -> list[bytes]:
    """Serialize a chunk's routes, if it has any, into one segment per policy version."""
    if chunk.routed_experts is None or num_experts == 0:
        return []
    routes, position, segments = torch.from_numpy(chunk.routed_experts), chunk.routes_from, []
    for span in chunk.route_spans:
        part, routes = routes[: span.num_tokens], routes[span.num_tokens :]
        segments.append(
            seal_routes(
                part,
                num_experts=num_experts,
                policy_version=span.policy_version,
                first_position=position,
            )
        )
        position += span.num_tokens
    return segments


def _spans(is_forced: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of true values in bool [N], as spans [start, end)."""
    if not is_forced.any():
        return []
    # The difference of booleans is true at every start and every end of a run.
    edges = np.flatnonzero(np.diff(is_forced, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _refusal(kind: RemoteErrorKind, error: str) -> RemoteError:
    return RemoteError(kind=kind, error=error)
