"""What runs a kernel: one protocol, and the choice of backend by device.

`penstock.kernels.ops` checks arguments and allocates results; a backend only fills them in.
"""

from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.kernels.errors import KernelArgumentError

if TYPE_CHECKING:
    from penstock.kernels.ops.quantize import Mxfp8
    from penstock.kernels.ops.routing import Routing

Tensor = torch.Tensor
NAMES = ("reference", "cpu", "simt", "cuda")


class KernelBackend(Protocol):
    """Fills `out` tensors that `ops` allocated; shapes stand at the functions of `ops`."""

    def mxfp8_quantize(self, x: Tensor, rows: "Mxfp8 | None", columns: "Mxfp8 | None") -> None:
        """Quantize [M, K] by rows, by columns, or both."""
        ...

    def mxfp8_dequantize(self, quantized: "Mxfp8", out: Tensor) -> None:
        """Dequantize [M, K]."""
        ...

    def router_topk(
        self,
        logits: Tensor,
        recorded: Tensor | None,
        routing: "Routing",
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

    def mxfp8_grouped_matmul(
        self, x: Tensor, weight: "Mxfp8", offsets: Tensor, out: Tensor
    ) -> None:
        """Multiply each expert's rows by its weight."""
        ...

    def delta_changes(self, base: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Compare bits [N] -> positions int32 [C], values [C]."""
        ...

    def delta_apply(self, bits: Tensor, positions: Tensor, values: Tensor) -> None:
        """Overwrite bits [N] in place."""
        ...


def backend_for(tensor: Tensor, name: str | None) -> KernelBackend:
    """Return the named backend, or the one of the tensor's device.

    Raises:
        KernelArgumentError: no such backend, or the tensor is not where that backend works.
        KernelUnavailableError: what the backend needs is missing.

    """
    name = name or tensor.device.type
    if name not in NAMES:
        raise KernelArgumentError(f"backend: expected one of {', '.join(NAMES)}, got {name!r}")
    device = "cuda" if name == "cuda" else "cpu"
    if tensor.device.type != device:
        raise KernelArgumentError(
            f"backend {name!r}: expected {device} tensors, got {tensor.device}"
        )
    return _load(name)


@cache
def _load(name: str) -> KernelBackend:
    """Import late: nothing of CUDA is needed until it is asked for."""
    if name in {"cuda", "simt"}:
        from penstock.kernels.cuda.backend import CudaBackend
        from penstock.kernels.cuda.launch import launch_cuda, launch_simt

        return CudaBackend(launch_cuda if name == "cuda" else launch_simt)
    from penstock.kernels.cpu import CpuBackend
    from penstock.kernels.reference.backend import ReferenceBackend

    compiled = CpuBackend.load() if name == "cpu" else None
    return compiled or ReferenceBackend()
