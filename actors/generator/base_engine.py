"""The part shared by all engines: request validation, and weight updates up to the commit."""

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
    """Live weights and a standby copy that is being written."""

    def begin(self) -> None:
        """Open an update that starts from the live weights."""
        ...

    def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Write tensors or patches into the standby copy."""
        ...

    def digest(self) -> str:
        """Return the root digest of the live weights."""
        ...


B = TypeVar("B", bound=DoubleBuffer)


class BaseEngine(ABC, Generic[B]):
    """The part of an `Engine` that does not depend on its backend; subclasses add the commit."""

    _streams: dict[str, Any]
    """Requests in flight, by request id."""

    def __init__(
        self, config: PolicyConfig, options: EngineOptions | VllmOptions, weights: B
    ) -> None:
        self._config, self._options, self._weights = config, options, weights
        self._weights_lock = asyncio.Lock()
        self._probe: list[float] = []
        self._expected: Sequence[float] = ()
        """What the trainer computed with the weights in use."""

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
        """Check that a request can be computed now; see `Engine.generate`.

        Raises:
            EngineNotReadyError: The engine has no weights or is not running.
            QueueFullError: The maximum number of requests is in flight.
            ContextLengthError: The prompt leaves no room for a token.
            InvalidRequestError: The request is already in flight or invalid; a retry does not help.

        """
        health, options, in_flight = self.health(), self._options, self._streams
        if not health.ready:
            raise EngineNotReadyError(
                f"engine has no weights or is not running {health.error}".rstrip()
            )
        if request_id in in_flight:
            raise InvalidRequestError(f"request_id {request_id!r} is already in flight")
        if len(in_flight) >= options.num_running_max + options.num_waiting_max:
            raise QueueFullError(f"the maximum of {len(in_flight)} requests is already in flight")
        length, vocab_size = len(token_ids), self._config.vocab_size
        # Strictly less, so that at least one token fits after the prompt.
        if not 1 <= length < options.num_tokens_max:
            raise ContextLengthError(length, options.num_tokens_max - 1)
        # After the length check, since an empty array has no minimum.
        if not 0 <= int(np.min(token_ids)) <= int(np.max(token_ids)) < vocab_size:
            raise InvalidRequestError(f"token_ids: expected ids in 0..{vocab_size - 1}")
        if not 0 <= routes_from < length:
            raise InvalidRequestError(f"routes_from: expected 0..{length - 1}, got {routes_from}")
        if fault := fault_of(sampling, vocab_size):
            raise InvalidRequestError(fault)
        if not 0 <= num_resumed < length:
            raise InvalidRequestError(f"num_resumed: expected 0..{length - 1}, got {num_resumed}")

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
            # In a thread, since copying all weights would block the event loop.
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
    """Return the grammar of a request in its initial state, or None if it has none.

    Raises:
        InvalidRequestError: The grammar does not compile within its limits, or has no text.

    """
    if sampling.grammar is None:
        return None
    if grammars is None or not sampling.grammar.text:
        raise InvalidRequestError(
            "sampling.grammar: expected the grammar's text, and an engine that supports grammars"
        )
    return await grammars.open(sampling.grammar.text)


_BFLOAT16_BITS = np.dtype(np.uint16)


def check_patch(
    name: str,
    patch: np.ndarray | Patch,
    shape: Sequence[int] | None,
    dtype: np.dtype = _BFLOAT16_BITS,
) -> None:
    """Check that a tensor or patch can be written into a tensor of the policy.

    Args:
        name: Name of the tensor.
        patch: Whole tensor or patch.
        shape: Shape of the policy's tensor; None if it has no such tensor.
        dtype: Its elements: bits of bfloat16, or float32.

    Raises:
        InvalidRequestError: The patch does not fit the tensor.

    """
    if shape is None:
        raise InvalidRequestError(f"the policy has no tensor {name!r}")
    if isinstance(patch, np.ndarray):
        if patch.dtype != dtype or patch.shape != tuple(shape):
            found = f"{patch.dtype} {patch.shape}"
            text = f"tensor {name}: expected {dtype} {tuple(shape)}, got {found}"
            raise InvalidRequestError(text)
        return
    indices, values = patch.flat_indices, patch.values
    words = np.dtype(f"u{dtype.itemsize}")
    if values.dtype != words or indices.dtype != np.int64 or indices.shape != values.shape:
        raise InvalidRequestError(
            f"patch of {name}: expected int64 [N] indices and {words} [N] values, got"
            f" {indices.dtype} {indices.shape} and {values.dtype} {values.shape}"
        )
    # Checked before anything is written: a patch must not be applied in part.
    last = int(np.prod(shape)) - 1
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) <= last:
        raise InvalidRequestError(f"patch of {name}: expected indices in 0..{last}")
