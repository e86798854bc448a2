"""The generator: serves `generate.<purpose>` from one engine.

    Generate ──▶ engine.generate ──a chunk of tokens under one version──▶ TokensSampled

Weights come by another road: a receiver in the same process stages and commits them in the engine.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

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
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.kernels.arrays import from_array, to_array
from penstock.kernels.route_segments import seal_routes
from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.errors import QueueFullError
from penstock.messages.generation import AbortGeneration, Generate, TokensSampled
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.task import Purpose


class Generator(Actor):
    """One replica: an engine and the purposes that it serves."""

    role = "generator"
    tick_s = 1.0

    def __init__(self, engine: Engine, purposes: Sequence[Purpose], replica: str) -> None:
        self._engine = engine
        self._capabilities = engine.capabilities()
        self._purposes = tuple(purposes)
        self._replica = replica

    def services(self) -> Mapping[str, Serve]:
        """Serve each purpose, and aborts addressed to this replica."""
        serves: dict[str, Serve] = {f"generate.{p}": self._generate for p in self._purposes}
        serves[f"abort.{self._replica}"] = self._abort
        return serves

    async def on_tick(self, ctx: Context) -> Effects:
        """Show the engine's state."""
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
        return ()

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
        async for chunk in self._engine.generate(
            from_array(message.token_ids),
            message.sampling,
            request_id=message.request_id,
            session_id=message.session_id,
            routes_from=message.routes_from,
        ):
            yield self._reply(message.request_id, chunk)

    def _reply(self, request_id: str, chunk: TokenChunk) -> TokensSampled:
        return TokensSampled(
            request_id=request_id,
            token_ids=to_array(chunk.token_ids),
            behavior_logprobs=to_array(chunk.behavior_logprobs),
            policy_version=chunk.policy_version,
            stop_reason=chunk.stop_reason,
            replica=self._replica,
            queue_ms=chunk.queue_ms,
            route_segments=seal_chunk(chunk, self._capabilities.num_experts),
            arithmetic=self._capabilities.arithmetic,
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


def _refusal(kind: RemoteErrorKind, error: str) -> RemoteError:
    return RemoteError(kind=kind, error=error)
