"""CUDA backend: grid sizes and arguments of each kernel."""

import numpy as np
import torch

from penstock.kernels.cuda.launch import Launch

Tensor = torch.Tensor
_THREADS = 256


class CudaBackend:
    """Backend that launches CUDA kernels."""

    defers_checks = True

    def __init__(self, launch: Launch, device: str) -> None:
        """Set the function that launches kernels and the device type of its tensors."""
        self._launch = launch
        self.device = device

    def routes_pack(self, ids: Tensor, width: int, packed: Tensor) -> None:
        """See `KernelBackend`."""
        grid = (_ceil(len(ids) * _ceil(packed.shape[1], 4), _THREADS), 1)
        sizes = (np.int64(len(ids)), *map(np.int32, (ids.shape[1], packed.shape[1], width)))
        self._launch("routes.routes_pack", grid, _THREADS, ids, packed, *sizes)

    def delta_apply(self, bits: Tensor, positions: Tensor, values: Tensor) -> None:
        """See `KernelBackend`."""
        grid = (_ceil(len(positions), _THREADS), 1)
        name = f"delta.delta_apply_{bits.element_size()}"
        sizes = (np.int64(len(positions)), np.int64(bits.numel()))
        self._launch(name, grid, _THREADS, bits, positions, values, *sizes)


def _ceil(count: int, of: int) -> int:
    return -(-count // of)
