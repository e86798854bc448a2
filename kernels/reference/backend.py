"""Reference backend: PyTorch tensors in and out, NumPy inside."""

import numpy as np
import torch

from penstock.kernels.backend import Mxfp8, Routing
from penstock.kernels.reference import quantize, rows
from penstock.kernels.reference import routing as routes

Tensor = torch.Tensor


class ReferenceBackend:
    """Backend on CPUs that computes in float32 and rounds each result once."""

    device = "cpu"
    defers_checks = False

    def mxfp8_quantize(self, x: Tensor, rows: Mxfp8 | None, columns: Mxfp8 | None) -> None:
        """See `KernelBackend`."""
        values = _float(x)
        if rows is not None:
            _fill(rows, quantize.mxfp8_rows(values))
        if columns is not None:
            _fill(columns, quantize.mxfp8_columns(values))

    def mxfp8_dequantize(self, quantized: Mxfp8, out: Tensor) -> None:
        """See `KernelBackend`."""
        _fill((out,), (quantize.mxfp8_dequantize(*(t.numpy() for t in quantized)),))

    def router_topk(
        self,
        logits: Tensor,
        recorded: Tensor | None,
        routing: Routing,
        normalize: bool,
        plausibility_min: float,
    ) -> None:
        """See `KernelBackend`."""
        routed = routes.router_topk(
            logits.numpy(),
            routing.ids.shape[1],
            normalize=normalize,
            recorded=None if recorded is None else recorded.numpy(),
            plausibility_min=plausibility_min,
        )
        _fill(routing, routed)

    def routes_pack(self, ids: Tensor, width: int, packed: Tensor) -> None:
        """See `KernelBackend`."""
        _fill((packed,), (routes.pack_routes(ids.numpy(), 1 << width),))

    def routes_unpack(self, packed: Tensor, width: int, ids: Tensor) -> None:
        """See `KernelBackend`."""
        unpacked = routes.unpack_routes(packed.numpy(), 1, ids.shape[1], 1 << width)
        _fill((ids,), (unpacked[:, 0],))

    def moe_combine(self, per_slot: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        _fill((out,), (routes.moe_combine(_float(per_slot), weights.numpy()),))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `KernelBackend`."""
        _fill((out,), (rows.rms_norm(_float(x), _float(weight), eps),))

    def token_logprobs(self, logits: Tensor, targets: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        _fill((out,), (rows.token_logprobs(_float(logits), targets.numpy()),))

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        _fill((out,), (rows.matmul(_float(x), _float(weight)),))

    def mxfp8_grouped_matmul(self, x: Tensor, weight: Mxfp8, offsets: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        codes, scales = (t.flatten(0, 1).numpy() for t in weight)
        dense = quantize.mxfp8_dequantize(codes, scales).reshape(weight.codes.shape)
        _fill((out,), (rows.grouped_matmul(_float(x), dense, offsets.numpy()),))

    def delta_changes(self, base: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """See `KernelBackend`."""
        positions = torch.from_numpy(np.flatnonzero(base.numpy() != target.numpy()))
        return positions.int(), target[positions]

    def delta_apply(self, bits: Tensor, positions: Tensor, values: Tensor) -> None:
        """See `KernelBackend`."""
        bits.numpy()[positions.numpy()] = values.numpy()


def _float(tensor: Tensor) -> np.ndarray:
    return tensor.float().numpy()


def _fill(outputs: tuple[Tensor, ...], arrays: tuple[np.ndarray, ...]) -> None:
    """Copy results into the outputs, rounding float32 to bfloat16 to nearest even."""
    for output, array in zip(outputs, arrays, strict=True):
        output.copy_(torch.from_numpy(np.ascontiguousarray(array)))
