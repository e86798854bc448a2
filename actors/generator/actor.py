"""The generator: serves `generate.<purpose>.<replica>` from one engine.

    Generate ──▶ engine.generate ──a chunk of tokens under one version──▶ TokensSampled

Weights come by another road: a receiver in the same process stages and commits them in the engine.
It reports what it serves once a second and whenever that changes; clients and the pacer count on
nothing else, so that a replica may join, leave or be lost at any time.
"""

import asyncio
import contextlib
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

TELL_S = 2.0
"""Longest time that a report may take."""
QUEUE_TICKS = 60
"""Ticks over which the queue time is a mean."""


class Generator(Actor):
    """One replica: an engine and the purposes that it serves.

    Args:
        engine: Started; a receiver gives it weights.
        purposes: What it serves once it has weights.
        region: Where it is.
        replica: Its name, unique in the run.
        channel: What its receiver follows.
        lag: How far its weights may be behind before it no longer serves training, which then goes
            on without it.

    """

    role = "generator"
    tick_s = 1.0
    follows: ClassVar[tuple[type[Event], ...]] = (WeightsPublished, WeightsApplied)

    def __init__(  # noqa: PLR0913 - an engine and how it is known
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
        self._told: ReplicaReported | None = None
        self._queues_ms: deque[list[float]] = deque([[]], maxlen=QUEUE_TICKS)
        """Queue times of requests, by tick."""

    def services(self) -> Mapping[str, Serve]:
        """Serve each purpose, and aborts, under this replica's own name."""
        serves: dict[str, Serve] = {
            f"generate.{purpose}.{self._replica}": self._generate for purpose in self._purposes
        }
        serves[f"abort.{self._replica}"] = self._abort
        return serves

    def not_ready(self) -> str:
        """Return that the engine has no weights yet, or has died."""
        health = self._engine.health()
        return "" if health.ready else health.error or "no weights yet"

    async def start(self, ctx: Context) -> Effects:
        """Be the newest process under this name."""
        self._started_at = ctx.now()
        return ()

    def processor_s(self) -> Mapping[str, float]:
        """Return what an engine with processes of its own used in them."""
        used_s = self._engine.metrics().processes_s
        return {"engine": used_s} if used_s else {}

    async def on_weights_published(self, event: WeightsPublished, ctx: Context) -> Effects:
        """Know how far behind it is."""
        self._lag.published(event.policy_version)
        return ()

    async def on_weights_applied(self, event: WeightsApplied, ctx: Context) -> Effects:
        """Report another version at once: requests wait for it."""
        if event.replica == self._replica and self._has_changed():
            await self._tell(self._report(ctx), ctx)
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Say that it leaves: its sessions move at once, and not only when it has been silent."""
        leaving = msgspec.structs.replace(self._report(ctx), serves=[], is_leaving=True)
        await self._tell(leaving, ctx)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Report, and show the engine's state."""
        self._show_gauges(ctx)
        await self._tell(self._report(ctx), ctx)
        self._queues_ms.append([])
        return ()

    def _has_changed(self) -> bool:
        told = self._told
        return told is None or told.policy_version != self._engine.health().policy_version

    async def _tell(self, report: ReplicaReported, ctx: Context) -> None:
        """Publish a report; one that does not get through is followed by another."""
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(TELL_S):
                await ctx.publish(report)
        self._told = report

    def _report(self, ctx: Context) -> ReplicaReported:
        health = self._engine.health()
        serves = list(self._purposes) if health.ready else []
        if self._lag.is_lost(health.policy_version, ctx.monotonic()):
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

    def _queue_s(self) -> float:
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
            "prefill_tokens": metrics.num_prefill_tokens,
            "cached_tokens": metrics.num_cached_tokens,
            "last_pause_ms": metrics.last_pause_ms,
        }
        for name, value in gauges.items():
            ctx.set_gauge(name, value)
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
        except ContextLengthError as error:
            yield _refusal(RemoteErrorKind.TOO_LONG, str(error))
        except (RequestFailedError, EngineDiedError) as error:
            yield _refusal(RemoteErrorKind.CHARGED, str(error))
        except (InvalidRequestError, ValueError) as error:
            yield _refusal(RemoteErrorKind.INVALID, str(error))
        except (QueueFullError, EngineNotReadyError) as error:
            yield _refusal(RemoteErrorKind.BUSY, str(error))
        except TimeoutError:
            text = f"request {message.request_id}: not done in {message.deadline_s} s"
            yield _refusal(RemoteErrorKind.FAILED, text)

    async def _replies(self, message: Generate) -> AsyncIterator[TokensSampled]:
        expected, held = pinned_version(message.channel), self._engine.health().policy_version
        if held != expected and (expected is not None or message.channel != self._channel):
            raise EngineNotReadyError(
                f"{self._replica}: asked for {message.channel}, but it follows {self._channel} and"
                f" serves version {held}"
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
            await self._engine.abort(message.request_id)
        yield Ack()


def seal_chunk(chunk: TokenChunk, num_experts: int) -> list[bytes]:
    """Seal a chunk's routes, if it has any, for their way: one segment per policy version."""
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
    """Return where bool [N] is true, as spans [start, end)."""
    if not is_forced.any():
        return []
    edges = np.flatnonzero(np.diff(is_forced, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _refusal(kind: RemoteErrorKind, error: str) -> RemoteError:
    return RemoteError(kind=kind, error=error)
