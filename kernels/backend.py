"""Protocol of kernel backends, the values that operations exchange, and their errors.

`penstock.kernels.ops` checks arguments and allocates results; a backend only fills in the results.
"""

from typing import NamedTuple, Protocol

import torch

from penstock.messages.errors import PenstockError

Tensor = torch.Tensor


class KernelArgumentError(PenstockError, ValueError):
    """A tensor has an unsuitable shape, dtype, device or value; the text says what is expected."""


class KernelUnavailableError(PenstockError, RuntimeError):
    """A compiler, driver or library needed for the device is missing; the text says which."""


class Mxfp8(NamedTuple):
    """Tensor of E4M3 codes with one E8M0 scale per block of 32."""

    codes: Tensor
    """uint8 [..., M, K]: E4M3 codes."""
    scales: Tensor
    """uint8 [..., M, K/32] for 1x32 blocks, [..., M/32, K] for 32x1 blocks: E8M0 scales."""


class Routing(NamedTuple):
    """Experts of T tokens, and their weights."""

    ids: Tensor
    """int16 [T, K]: expert ids in slot order, which is best first or as recorded."""
    weights: Tensor
    """float32 [T, K]: weights of the experts."""
    num_mismatched: Tensor
    """int32 [T]: number of recorded ids that the router itself would not have chosen."""
    num_replaced: Tensor
    """int32 [T]: number of recorded ids that were implausible and replaced by the router's own."""


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

    def mxfp8_quantize(self, x: Tensor, rows: Mxfp8 | None, columns: Mxfp8 | None) -> None:
        """Quantize [M, K] by rows, by columns, or both."""
        ...

    def mxfp8_dequantize(self, quantized: Mxfp8, out: Tensor) -> None:
        """Dequantize [M, K]."""
        ...

    def router_topk(
        self,
        logits: Tensor,
        recorded: Tensor | None,
        routing: Routing,
        normalize: bool,
        plausibility_min: float,
    ) -> None:
        """Route [T, E]."""
        ...

    def routes_pack(self, ids: Tensor, width: int, packed: Tensor) -> None:
        """Pack int16 [T, L*K] into `width` bits each."""
        ...

    def routes_unpack(self, packed: Tensor, width: int, ids: Tensor) -> None:
        """Unpack int16 [T, L*K]."""
        ...

    def moe_combine(self, per_slot: Tensor, weights: Tensor, out: Tensor) -> None:
        """Sum [T, K, H] over K."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Normalize [M, H]."""
        ...

    def token_logprobs(self, logits: Tensor, targets: Tensor, out: Tensor) -> None:
        """Log-softmax of [N, V] at [N]."""
        ...

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Multiply [M, K] by [N, K] transposed."""
        ...

    def mxfp8_grouped_matmul(self, x: Tensor, weight: Mxfp8, offsets: Tensor, out: Tensor) -> None:
        """Multiply each expert's rows by its weight."""
        ...

    def delta_changes(self, base: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Find where bits [N] differ -> positions int32 [C], values [C]."""
        ...

    def delta_apply(self, bits: Tensor, positions: Tensor, values: Tensor) -> None:
        """Overwrite bits [N] in place."""
        ...
