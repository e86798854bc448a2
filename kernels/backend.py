"""Protocol of kernel backends, and their errors.

`penstock.kernels.ops` checks arguments and allocates results; a backend only fills in the results.
"""

from typing import Protocol

import torch

from penstock.messages.errors import PenstockError

Tensor = torch.Tensor


class KernelArgumentError(PenstockError, ValueError):
    """A tensor has an unsuitable shape, dtype, device or value; the text says what is expected."""


class KernelUnavailableError(PenstockError, RuntimeError):
    """A compiler, driver or library needed for the device is missing; the text says which."""


class KernelBackend(Protocol):
    """Implementation of the operations; `ops` documents the shapes and allocates the outputs."""

    @property
    def device(self) -> str:
        """Device type of the tensors that the backend accepts."""
        ...

    @property
    def defers_checks(self) -> bool:
        """Whether values are checked asynchronously, so that errors are raised by a later call."""
        ...

    def routes_pack(self, ids: Tensor, width: int, packed: Tensor) -> None:
        """Pack int16 [T, L*K] into `width` bits each."""
        ...

    def delta_apply(self, bits: Tensor, positions: Tensor, values: Tensor) -> None:
        """Overwrite bits [N] in place."""
        ...
