"""What every engine does alike: admission of requests, and weight updates up to the commit."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from penstock.actors.generator.engine import (
    ContextLengthError,
    EngineCapabilities,
    EngineHealth,
    EngineNotReadyError,
    InvalidRequestError,
)
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.sampler import GrammarMasks, TurnGrammar
from penstock.actors.generator.vllm.options import VllmOptions
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.settings import fault_of
from penstock.kernels.delta import Patch
from penstock.messages.errors import QueueFullError
from penstock.messages.task import Sampling


class DoubleBuffer(Protocol):
    """The weights in use, and a copy that is being written."""

    def begin(self) -> None:
        """Open an update that starts from the live weights."""
        ...

    def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Write into the standby."""
        ...

    def digest(self) -> str:
        """Return the root digest of the live weights."""
        ...


B = TypeVar("B", bound=DoubleBuffer)


class BaseEngine(ABC, Generic[B]):
    """The part of an `Engine` that does not depend on what computes; a commit is the engine's."""

    _streams: dict[str, Any]
    """By request id."""

    def __init__(
        self, config: PolicyConfig, options: EngineOptions | VllmOptions, weights: B
    ) -> None:
        self._config, self._options, self._weights = config, options, weights
        self._weights_lock = asyncio.Lock()
        self._probe: list[float] = []

    @abstractmethod
    def health(self) -> EngineHealth:
        """See `Engine.health`."""

    def _check(
        self,
        request_id: str,
        token_ids: np.ndarray,
        sampling: Sampling,
        routes_from: int,
        num_resumed: int,
    ) -> None:
        """Refuse what cannot be computed, or not now; see `Engine.generate`.

        Raises:
            EngineNotReadyError: No weights, or not running.
            QueueFullError: As many requests are in flight as may be.
            ContextLengthError: The prompt leaves no room for a token.
            InvalidRequestError: It is in flight already, or no retry helps for another reason.

        """
        health, options, in_flight = self.health(), self._options, self._streams
        if not health.ready:
            raise EngineNotReadyError(f"no weights, or not running {health.error}".rstrip())
        if request_id in in_flight:
            raise InvalidRequestError(f"request_id {request_id!r} is in flight already")
        if len(in_flight) >= options.num_running_max + options.num_waiting_max:
            raise QueueFullError(f"{len(in_flight)} requests are in flight, the most allowed")
        length, vocab_size = len(token_ids), self._config.vocab_size
        if not 1 <= length < options.num_tokens_max:
            raise ContextLengthError(length, options.num_tokens_max - 1)
        if not 0 <= int(np.min(token_ids)) <= int(np.max(token_ids)) < vocab_size:
            raise InvalidRequestError(f"token_ids must lie in 0..{vocab_size - 1}")
        if not 0 <= routes_from < length:
            raise InvalidRequestError(f"routes_from must lie in 0..{length - 1}, not {routes_from}")
        if fault := fault_of(sampling, vocab_size):
            raise InvalidRequestError(fault)
        if not 0 <= num_resumed < length:
            raise InvalidRequestError(f"num_resumed: expected 0..{length - 1}")

    def _capabilities(self, name: str, step: str, cache_block: int = 1) -> EngineCapabilities:
        options = self._options
        return EngineCapabilities(
            name=name,
            num_tokens_max=options.num_tokens_max,
            num_running_max=options.num_running_max,
            num_waiting_max=options.num_waiting_max,
            arithmetic=f"{step}/{self._config.numerics.expert_format}",
            num_experts=self._config.num_experts,
            cache_block=cache_block,
        )

    async def begin_update(self) -> None:
        """See `Engine.begin_update`."""
        async with self._weights_lock:
            await asyncio.to_thread(self._weights.begin)

    async def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """See `Engine.apply`."""
        async with self._weights_lock:
            await asyncio.to_thread(self._weights.apply, patches)

    def probe(self) -> list[float]:
        """See `Engine.probe`."""
        return self._probe

    async def digest(self) -> str:
        """See `Engine.digest`."""
        async with self._weights_lock:
            return await asyncio.to_thread(self._weights.digest)


async def open_grammar(sampling: Sampling, grammars: GrammarMasks | None) -> TurnGrammar | None:
    """Return the grammar of a request at its beginning, or None if it has none.

    Raises:
        InvalidRequestError: It does not compile within its limits, or is only a digest.

    """
    if sampling.grammar is None:
        return None
    if grammars is None or not sampling.grammar.text:
        raise InvalidRequestError("sampling.grammar: expected the text of one that is known")
    return await grammars.open(sampling.grammar.text)


def check_patch(name: str, patch: np.ndarray | Patch, shape: Sequence[int] | None) -> None:
    """Check what is to be written into a tensor; the shape is None where there is no such tensor.

    Raises:
        InvalidRequestError: It does not fit.

    """
    if shape is None:
        raise InvalidRequestError(f"the policy has no tensor {name!r}")
    if isinstance(patch, np.ndarray):
        if patch.dtype != np.uint16 or patch.shape != tuple(shape):
            found = f"{patch.dtype} {patch.shape}"
            raise InvalidRequestError(f"tensor {name} must be uint16 {tuple(shape)}, not {found}")
        return
    indices, values = patch.flat_indices, patch.values
    if values.dtype != np.uint16 or indices.dtype != np.int64 or indices.shape != values.shape:
        raise InvalidRequestError(f"patch of {name}: int64 [N] indices and uint16 [N] values")
    last = int(np.prod(shape)) - 1
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) <= last:
        raise InvalidRequestError(f"patch of {name}: indices must lie in 0..{last}")
