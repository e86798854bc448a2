"""Weight updates, as far as they are the same in every engine."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from penstock.actors.generator.engine import InvalidRequestError
from penstock.kernels.delta import Patch


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


class StagedUpdates(Generic[B]):
    """The methods of `Engine` that concern the double buffer alone; a commit is the engine's."""

    def __init__(self, weights: B) -> None:
        self._weights = weights
        self._weights_lock = asyncio.Lock()
        self._probe: list[float] = []

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
